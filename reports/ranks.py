"""Jobs on several GPUs in the terminal report: a row a distinct rank, and what the GPUs do not share."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from metapeak.reports.sizes import gib
from metapeak.tracer.simulation import RankResult, Simulation


def world_size(simulation: Simulation) -> int:
    """Ranks in all."""
    return sum(rank.count for rank in simulation.ranks)


def describe_layout(simulation: Simulation) -> str:
    """`fsdp2 on 8 GPUs (dp_shard 8)`, or nothing for one GPU and no engine."""
    options = {name: option.value for name, option in simulation.options.items()}
    engine = options.get("engine") or "none"
    degrees = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
    given = [f"{name} {options[name]}" for name in degrees if (options.get(name) or 1) > 1]
    if engine == "none" and not given:
        return ""
    count = world_size(simulation)
    where = f"{count} GPU{'s' if count > 1 else ''}" + (f" ({', '.join(given)})" if given else "")
    return where if engine == "none" else f"{engine} on {where}"


def print_ranks(simulation: Simulation, console: Console) -> None:
    """The table of distinct ranks and the bytes that are not shared; nothing for one GPU."""
    if not any(rank.coordinates for rank in simulation.ranks):
        return
    worst = simulation.worst
    axes = [axis for axis in worst.coordinates if any(rank.coordinates[axis] for rank in simulation.ranks)]
    table = Table(title="Ranks that differ, GiB", title_justify="left", box=None, pad_edge=False)
    for name in ("rank", "ranks alike", *axes, "requested", "allocated", "reserved", "device"):
        table.add_column(name, justify="right")
    table.add_column("peak in")
    table.add_column("")
    for rank in simulation.ranks:
        table.add_row(
            str(rank.rank),
            str(rank.count),
            *(str(rank.coordinates[axis]) for axis in axes),
            *(gib(n) for n in (rank.requested_bytes, rank.allocated_bytes, rank.reserved_bytes, rank.device_bytes)),
            f"{rank.peak_at.phase} of {rank.peak_at.iteration}",
            "<- worst" if rank is worst and len(simulation.ranks) > 1 else "",
        )
    console.print()
    console.print(table)
    _not_shared(worst, console)


def _not_shared(rank: RankResult, console: Console) -> None:
    if not rank.not_shared:
        return
    total = sum(rank.not_shared.values())
    parts = [f"{name} {gib(nbytes)}" for name, nbytes in rank.not_shared.items()]
    console.print()
    console.print(
        Text.assemble(
            ("What your GPUs do not share", "bold"),
            f": {gib(total)} GiB of rank {rank.rank} when it is most, below which no number of data-parallel GPUs "
            "brings the peak, in GiB:",
        )
    )
    console.print(Text("  " + "   ".join(parts)))
