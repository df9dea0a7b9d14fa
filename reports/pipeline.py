"""The schedule of a pipeline in the terminal and in JSON: what every rank did, in order, with its live bytes."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from metapeak.reports.sizes import gib
from metapeak.strategies.parallel.pipeline import balance
from metapeak.tracer.simulation import PipelineAction, RankResult, Simulation

SKIPPED = "..."


def pipeline_record(simulation: Simulation) -> dict[str, Any] | None:
    """Actions of every distinct rank, of all iterations, with live bytes; None without a pipeline."""
    ranks = [rank for rank in simulation.ranks if rank.actions]
    if not ranks:
        return None
    return {
        "max_over_mean": round(_balance(simulation), 4),
        "ranks": [
            {
                "rank": rank.rank,
                "pp": rank.coordinates["pp"],
                "in_flight": max(action.in_flight for action in rank.actions),
                "actions": [
                    {
                        "iteration": action.iteration,
                        "action": name_of(action, several=True),
                        "peak_bytes": action.peak_bytes,
                        "end_bytes": action.end_bytes,
                        "in_flight": action.in_flight,
                    }
                    for action in rank.actions
                ],
            }
            for rank in ranks
        ],
    }


def name_of(action: PipelineAction, *, several: bool) -> str:
    """F0, or with several stages a rank as torch writes it, 4F0: the stage, what it did, the microbatch."""
    stage = str(action.stage) if several else ""
    return f"{stage}{action.kind}{action.microbatch if action.microbatch >= 0 else ''}"


def print_pipeline(simulation: Simulation, console: Console) -> None:
    """A row a rank: its actions in the last step, and under each the most that was live meanwhile."""
    ranks = [rank for rank in simulation.ranks if rank.actions]
    if not ranks:
        return
    console.print()
    console.print(
        Text.assemble(
            ("Schedule", "bold"),
            " of the last step, a column an action: F forward, B backward, I for inputs, W for weights, R gradients "
            "reduced; live GiB at most meanwhile, kernel workspaces not counted:",
        )
    )
    seen = set()
    for rank in ranks:
        if rank.coordinates["pp"] in seen:  # ranks of one stage that differ in their shards alone
            continue
        seen.add(rank.coordinates["pp"])
        for line in _drawn(rank, console.width):
            console.print(Text(line, no_wrap=True))
    over = _balance(simulation)
    console.print(
        f"Even stages would take {100 * (1 - 1 / over):.0f} % off the worst rank: max / mean of peaks = {over:.2f}."
    )


def _drawn(rank: RankResult, width: int) -> list[str]:
    """Two lines: actions and bytes. What does not fit in `width` is left out in the middle, with a count."""
    last = max(action.iteration for action in rank.actions)
    actions = [action for action in rank.actions if action.iteration == last]
    several = len({action.stage for action in actions}) > 1
    in_flight = max(action.in_flight for action in actions)
    names = [name_of(action, several=several) for action in actions]
    sizes = [gib(action.peak_bytes) for action in actions]
    column = max(len(text) for text in (*names, *sizes, SKIPPED)) + 1
    head = (f"  rank {rank.rank}", f"  {in_flight} in flight")
    margin = max(map(len, head)) + 2
    fits = max((width - margin) // column, 3)
    if len(actions) > fits:
        first = (fits - 1) * 2 // 3
        after = len(actions) - (fits - 1 - first)
        skipped = f"+{after - first}"
        names = [*names[:first], skipped, *names[after:]]
        sizes = [*sizes[:first], SKIPPED, *sizes[after:]]
    rows = (names, sizes)
    return [title.ljust(margin) + "".join(text.rjust(column) for text in row) for title, row in zip(head, rows)]


def _balance(simulation: Simulation) -> float:
    return balance([(rank.requested_bytes, rank.count) for rank in simulation.ranks])
