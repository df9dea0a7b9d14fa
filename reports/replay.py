"""`metapeak replay`: recorded allocator histories replayed, as JSON-able records and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from metapeak.reports.sizes import gib
from metapeak.tracer.device.allocator_config import parse_allocator_config
from metapeak.tracer.device.replay import ReplayResult, Tally, replay
from metapeak.tracer.device.snapshot_reader import read_snapshot
from metapeak.tracer.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayedTrace:
    """The replay of one device's history in one file; `settings` says with which allocator settings and from where."""

    file: str
    settings: str
    blind: bool
    result: ReplayResult


def replay_files(paths: Sequence[str], *, blind: bool = False, settings: str | None = None) -> list[ReplayedTrace]:
    """Every device history in the snapshots at `paths`, replayed.

    `settings` replaces the recorded allocator settings. Raises InputError (UnknownName for a setting) for a file that
    cannot be used, before anything is returned.
    """
    given = parse_allocator_config(settings) if settings is not None else None
    traces = []
    for path in paths:
        snapshot = read_snapshot(path)
        if not snapshot.recorded:
            raise InputError(
                f"{path} holds no events to replay, only the segments at its end. Call "
                "torch.cuda.memory._record_memory_history() before the step and dump the snapshot after it."
            )
        words = f"{snapshot.config.text or 'defaults'}, as recorded"
        if given is not None:
            words = f"{settings}, as given"
        elif not snapshot.settings_recorded:
            words = "defaults, as none are recorded"
        for history in snapshot.recorded:
            result = replay(history, given or snapshot.config, blind=blind)
            traces.append(ReplayedTrace(file=path, settings=words, blind=blind, result=result))
    return traces


def replay_record(traces: Sequence[ReplayedTrace]) -> dict[str, Any]:
    """The contract's record: a row a trace, and sums over all of them. Bytes are integers."""
    results = [trace.result for trace in traces]
    return {
        "traces": [_trace(trace) for trace in traces],
        "summary": {
            "traces": len(traces),
            "exact": sum(result.exact for result in results),
            "requests": sum(result.requests for result in results),
            "growths": _sum([result.growths for result in results]),
            "releases": _sum([result.releases for result in results]),
            "addresses": _addresses(_sum([result.addresses for result in results])),
            "peaks": {
                "recorded": len(results),
                "matched": sum(result.peak_reserved_recorded == result.peak_reserved_replayed for result in results),
            },
            "retries": {
                name: sum(getattr(result.retries, name) for result in results)
                for name in ("recorded", "predicted", "matched")
            },
        },
    }


def _trace(trace: ReplayedTrace) -> dict[str, Any]:
    result, retries = trace.result, trace.result.retries
    return {
        "file": trace.file,
        "device": result.device,
        "settings": trace.settings,
        "blind": trace.blind,
        "starts_empty": result.starts_empty,
        "requests": result.requests,
        "growths": _tally(result.growths),
        "releases": _tally(result.releases),
        "peak_reserved": {"recorded": result.peak_reserved_recorded, "replayed": result.peak_reserved_replayed},
        "peak_allocated": {"replayed": result.peak_allocated_replayed},
        "addresses": _addresses(_tally(result.addresses)),
        "retries": {
            "recorded": retries.recorded,
            "predicted": retries.predicted,
            "matched": retries.matched,
            "capacity_bytes": retries.capacity,
            "unexplained": retries.unexplained,
        },
        "ooms": {"recorded": retries.ooms_recorded, "matched": retries.ooms_matched},
        "exact": result.exact,
    }


def _tally(tally: Tally) -> dict[str, int]:
    return {"recorded": tally.recorded, "matched": tally.matched, "false": tally.false}


def _addresses(tally: dict[str, int]) -> dict[str, int]:
    return {name: tally[name] for name in ("recorded", "matched")}


def _sum(tallies: Sequence[Tally]) -> dict[str, int]:
    rows = [_tally(tally) for tally in tallies]
    return {name: sum(row[name] for row in rows) for name in ("recorded", "matched", "false")}


def print_replays(traces: Sequence[ReplayedTrace], console: Console) -> None:
    """Print a row a trace: matched of recorded (and how many more the replay made)."""
    table = Table(box=None, pad_edge=False)
    table.add_column("file", overflow="fold")
    table.add_column("device", justify="right")
    for name in ("growths", "releases", "block addresses", "retries", "peak GiB", "replayed"):
        table.add_column(name, justify="right", no_wrap=name in ("peak GiB", "replayed"))
    for trace in traces:
        result = trace.result
        table.add_row(
            trace.file,
            str(result.device),
            _words(result.growths),
            _words(result.releases),
            f"{result.addresses.matched:,} of {result.addresses.recorded:,}",
            f"{result.retries.matched} of {result.retries.recorded}",
            gib(result.peak_reserved_recorded),
            "equal"
            if result.peak_reserved_replayed == result.peak_reserved_recorded
            else gib(result.peak_reserved_replayed),
        )
    console.print(table)
    exact = sum(trace.result.exact for trace in traces)
    how = "with invented segment addresses" if traces[0].blind else "with the recorded segment addresses"
    console.print(f"{exact} of {len(traces)} traces replayed exactly, {how}.")
    for words in dict.fromkeys(trace.settings for trace in traces):
        console.print(f"Allocator settings: {words}.")


def _words(tally: Tally) -> str:
    return f"{tally.matched:,} of {tally.recorded:,}" + (f" (+{tally.false})" if tally.false else "")
