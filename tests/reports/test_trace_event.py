"""The Chrome trace: the format's rules, and the bytes of the liveness at every operation."""

import json
from itertools import pairwise

from metapeak.reports.curves import bytes_by_category
from metapeak.reports.data import CATEGORY_NAMES
from metapeak.reports.trace_event import COUNTER, MODULES, PHASES, render_trace_events

# Fields that each kind of event has to have ("Trace Event Format").
REQUIRED = {
    "M": {"ph", "pid", "tid", "name", "args"},
    "X": {"ph", "pid", "tid", "name", "ts", "dur"},
    "C": {"ph", "pid", "name", "ts", "args"},
    "i": {"ph", "pid", "tid", "name", "ts", "s"},
}


def events_of(simulation):
    trace = json.loads(render_trace_events(simulation))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    return trace["traceEvents"]


def test_every_event_has_the_fields_of_its_kind(two_ranks):
    for event in events_of(two_ranks):
        assert REQUIRED[event["ph"]] <= event.keys()
        numbers = [event[name] for name in ("ts", "dur", "pid", "tid") if name in event]
        assert all(type(number) is int and number >= 0 for number in numbers)
        assert event.get("dur", 1) > 0


def test_counters_equal_the_liveness_at_every_operation(two_ranks):
    events = events_of(two_ranks)
    for rank in two_ranks.ranks:
        table = bytes_by_category(rank.liveness)
        counters = {e["ts"]: e["args"] for e in events if e["ph"] == "C" and e["pid"] == rank.rank}
        assert {e["name"] for e in events if e["ph"] == "C"} == {COUNTER}
        current = {}
        for index in range(rank.liveness.num_ops):
            current = counters.get(index, current)
            for category, name in CATEGORY_NAMES.items():
                assert current.get(name, 0) == table[category, index]


def test_slices_nest_and_cover_every_operation(traced):
    liveness = traced.worst.liveness
    events = [event for event in events_of(traced) if event["ph"] == "X"]
    covered = [[] for _ in range(liveness.num_ops)]
    for event in (event for event in events if event["tid"] == MODULES):
        for index in range(event["ts"], event["ts"] + event["dur"]):
            covered[index].append(event)
    for index, slices in enumerate(covered):
        slices.sort(key=lambda event: -event["dur"])
        # viewers draw overlapping slices only if they nest
        for outer, inner in pairwise(slices):
            assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
        names = sorted(event["name"] for event in slices)
        path = liveness.module_names[liveness.op_module[index]]
        assert names == sorted(path.split(".") if path else [])
    phases = [event for event in events if event["tid"] == PHASES]
    assert [event["name"] for event in phases][:3] == ["load", "forward 1", "backward 1"]
    assert sum(event["dur"] for event in phases) == liveness.num_ops


def test_ranks_are_processes_and_the_peak_is_marked(two_ranks):
    events = events_of(two_ranks)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0 x 3, pp 0", 3: "rank 3 x 3, pp 1"}
    peaks = {event["pid"]: event for event in events if event["ph"] == "i"}
    for rank in two_ranks.ranks:
        assert peaks[rank.rank]["ts"] == rank.peak_index
        assert peaks[rank.rank]["args"]["live_bytes"] == rank.requested_bytes
