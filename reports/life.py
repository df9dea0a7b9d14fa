"""The phases of a job's life, one row each: load, first step, steady step, evaluation, generation, save."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from metapeak.reports.sizes import gib
from metapeak.tracer.simulation import Simulation


def life_rows(simulation: Simulation) -> list[dict[str, Any]]:
    """Rows of the worst rank in order of time: `phase`, `peak_bytes` and `end_bytes` (traced storages), `host_bytes`,
    whether it is `asked` for, hence counted in the peak and the verdict, and whether it `is_peak`.
    """
    rank = simulation.worst
    at = _name(rank.peak_at.iteration, rank.peak_at.phase)
    rows: dict[str, dict[str, Any]] = {}
    for phase in rank.phases:
        name = _name(phase.iteration, phase.phase)
        host = rank.host.get("training" if name.endswith("step") else name, {}).get("host_bytes", 0)
        known = rows.get(name, {"peak_bytes": 0})
        peak = max(known["peak_bytes"], phase.peak_bytes)
        rows[name] = _row(name, peak, phase.end_bytes, host, asked=True, is_peak=name == at)
    unasked = [
        _row(phase.phase, phase.peak_bytes, phase.end_bytes, phase.host_bytes, asked=False, is_peak=False)
        for phase in simulation.unasked
    ]
    return [*rows.values(), *unasked]


def _row(phase: str, peak: int, end: int, host: int, *, asked: bool, is_peak: bool) -> dict[str, Any]:
    sizes = {"peak_bytes": peak, "end_bytes": end, "host_bytes": host}
    return {"phase": phase, **sizes, "asked": asked, "is_peak": is_peak}


def _name(iteration: int, phase: str) -> str:
    if phase in ("forward", "backward", "optimizer"):
        return "first step" if iteration == 1 else "steady step"
    return phase


def print_life(simulation: Simulation, console: Console) -> None:
    """A line with every phase of the job's life, and one for each that would need more than what was asked for."""
    rows = life_rows(simulation)
    asked = [f"{row['phase']} {gib(row['peak_bytes'])}{' <- peak' * row['is_peak']}" for row in rows if row["asked"]]
    beside = [f"{row['phase']} {gib(row['peak_bytes'])}" for row in rows if not row["asked"]]
    text = ", ".join(asked) + (f"; if they are run: {', '.join(beside)}" if beside else "")
    console.print(Text(f"Peaks over the job's life, GiB: {text}"))
    peak = max(row["peak_bytes"] for row in rows if row["asked"])
    for row in rows:
        if not row["asked"] and row["peak_bytes"] > peak:
            more = f"The {row['phase']} would need {gib(row['peak_bytes'] - peak)} GiB more than the training steps"
            console.print(Text(f"{more} and is not in the verdict: ask with {_FLAGS[row['phase']]}.", style="yellow"))


_FLAGS = {"evaluation": "--evaluate [--eval-batch-size N]", "save": "--save"}
