"""A step as Chrome trace events, for ui.perfetto.dev and chrome://tracing: live bytes, phases, modules, operations.

One process a rank. One microsecond is one operation: the trace knows the order of operations, not how long they take.

Source: "Trace Event Format" of the Chromium project (JSON object format; events M, X, C and i).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from metapeak.reports.curves import bytes_by_category, phase_spans
from metapeak.reports.data import CATEGORY_NAMES
from metapeak.tracer.liveness import Category, Liveness
from metapeak.tracer.simulation import RankResult, Simulation

# Threads of a rank's process, top to bottom.
PHASES, MODULES, OPERATIONS = 1, 2, 3
_THREADS = {PHASES: "phases", MODULES: "modules", OPERATIONS: "operations"}

COUNTER = "live bytes"


def render_trace_events(simulation: Simulation) -> str:
    """The JSON text of the trace."""
    return json.dumps(trace_events(simulation), separators=(",", ":"))


def trace_events(simulation: Simulation) -> dict[str, Any]:
    """The trace as an object: `traceEvents` and what the viewers show about it."""
    events = [event for rank in simulation.ranks for event in _rank_events(rank)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "model": simulation.model.id,
            "time": "one microsecond is one operation; durations are not predicted",
            "torch": simulation.how.torch,
        },
    }


def _rank_events(rank: RankResult) -> Iterator[dict[str, Any]]:
    liveness, pid = rank.liveness, rank.rank
    coordinates = "".join(f", {axis} {position}" for axis, position in rank.coordinates.items())
    alike = f" x {rank.count}" if rank.count > 1 else ""
    yield _metadata(pid, 0, "process_name", f"rank {rank.rank}{alike}{coordinates}")
    for tid, name in _THREADS.items():
        yield _metadata(pid, tid, "thread_name", name)
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
    yield from _counters(liveness, pid)
    for span in phase_spans(liveness):
        yield _slice(pid, PHASES, span.label, span.start, span.end)
    yield from _module_slices(liveness, pid)
    for index in range(liveness.num_ops):
        yield _slice(pid, OPERATIONS, liveness.op_names[liveness.op[index]], index, index + 1)
    yield {
        "ph": "i",
        "s": "p",
        "pid": pid,
        "tid": PHASES,
        "ts": rank.peak_index,
        "name": "peak",
        "args": {
            "live_bytes": rank.requested_bytes,
            "largest": [f"{tensor.nbytes} {tensor.category} {tensor.module}" for tensor in rank.largest()],
        },
    }


def _counters(liveness: Liveness, pid: int) -> Iterator[dict[str, Any]]:
    """A stacked counter: one event wherever a category changes, with all of them."""
    table = bytes_by_category(liveness)
    used = [category for category in Category if table[category].any()]
    columns = table[used]
    changes = np.flatnonzero(np.any(np.diff(columns, axis=1, prepend=-1), axis=0))
    for index in changes.tolist():
        args = {CATEGORY_NAMES[category]: int(nbytes) for category, nbytes in zip(used, columns[:, index])}
        yield {"ph": "C", "pid": pid, "ts": index, "name": COUNTER, "args": args}


def _module_slices(liveness: Liveness, pid: int) -> Iterator[dict[str, Any]]:
    """Nested slices: a module lasts as long as consecutive operations of one phase belong to it or what is inside."""
    parts = [path.split(".") if path else [] for path in liveness.module_names]
    for span in phase_spans(liveness):
        opened: list[tuple[str, int]] = []
        for index in range(span.start, span.end + 1):
            path = parts[liveness.op_module[index]] if index < span.end else []
            common = 0
            while common < min(len(opened), len(path)) and opened[common][0] == path[common]:
                common += 1
            while len(opened) > common:
                name, start = opened.pop()
                yield _slice(pid, MODULES, name, start, index)
            opened += [(name, index) for name in path[common:]]


def _slice(pid: int, tid: int, name: str, start: int, end: int) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": end - start}


def _metadata(pid: int, tid: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
