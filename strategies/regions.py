"""Regions of a recorded step that a checkpoint covers: which operations, what they save, when backward wants them.

recompute.py makes them run again; its notes say what [Nested], [Reentrant] and [Kept operations] mean.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from metapeak.tracer.errors import InputError
from metapeak.tracer.graph import StepGraph, values_in
from metapeak.tracer.liveness import Phase

# Less than any two events are apart, however deep regions lie inside one another.
_JUST_BEFORE = 2.0**-10


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """One call of a checkpointed module: its operations [begin, end), its saves, and when backward wants it back.

    `stop` is the operation before which the recompute ends; `wanted` (and its tick) the operation before which
    backward first reads a save, None when it reads none; `over` (tick, operations recorded) when the last of its saves
    is released. `kept`: operations, in order, whose outputs are cached in forward and that do not run again.
    `reentrant`: see Note [Reentrant]. `inner` (saves of regions inside), `handed_in`, `kept_for_inner` (storage, tick,
    operations recorded) and `kept_to_its_end`: see Note [Nested]. `recast` (storage, operations recorded, tick, the
    operation that made it): casts that the region found in the cache, in order: see Note [Autocast].
    """

    begin: int
    end: int
    saves: range
    stop: int
    stop_tick: int
    wanted: int | None
    wanted_tick: float
    over: tuple[int, int]
    inputs: tuple[int, ...]
    kept: tuple[int, ...] = ()
    reentrant: bool = False
    keywords: tuple[int, ...] = ()
    graph_over: tuple[int, int] = (0, 0)
    inner: tuple[range, ...] = ()
    handed_in: tuple[int, ...] = ()
    kept_for_inner: tuple[tuple[int, int, int], ...] = ()
    kept_to_its_end: tuple[int, ...] = ()
    recast: tuple[tuple[int, int, int, int], ...] = ()

    @property
    def own_saves(self) -> np.ndarray:
        """The saves of the region itself, not those of regions inside it."""
        saves = np.arange(self.saves.start, self.saves.stop)
        for part in self.inner:
            saves = saves[(saves < part.start) | (saves >= part.stop)]
        return saves

    @property
    def operations(self) -> np.ndarray:
        """The operations that run again, in order."""
        again = np.arange(self.begin, self.stop if self.wanted is not None else self.begin)
        before = [at - self.begin for _, at, _, _ in self.recast] if len(again) else []
        again = np.insert(again, before, [made for _, _, _, made in self.recast][: len(before)])
        return again[~np.isin(again, self.kept)]

    @property
    def length(self) -> int:
        """Operations that run again."""
        return 0 if self.wanted is None else int(self.since_start(self.stop, self.stop_tick))

    @property
    def left_in_cache(self) -> tuple[int, ...]:
        """Kept operations whose outputs no recompute takes out."""
        return tuple(kept for kept in self.kept if self.wanted is None or kept >= self.stop)

    def since_start(self, operation, tick):
        """Operations that have run again when the recompute is where the forward was at `tick`, before `operation`."""
        recast = np.searchsorted(np.array([at for _, _, at, _ in self.recast], dtype=np.int64), tick)
        return operation - self.begin - np.searchsorted(np.array(self.kept, dtype=np.int64), operation) + recast

    @property
    def recast_rows(self) -> tuple[int, ...]:
        return tuple(row for row, _, _, _ in self.recast)


def regions_of(graph: StepGraph, modules: Iterable[str], *, reentrant: bool = False) -> list[Region]:
    """The calls of these modules that saved something, in order of the trace.

    Raises InputError for a module that the step never called, and for reentrant regions inside one another.
    """
    saved = graph.saved
    wanted = {graph.module_names.index(name) if name in graph.module_names else -1: name for name in modules}
    if -1 in wanted:
        raise InputError(f"The model has no module '{wanted[-1]}'.")
    called = {saved.call_module[call] for call in range(len(saved.call_module))}
    for index, name in wanted.items():
        if index not in called:
            raise InputError(f"Module '{name}' is not called in the forward pass, so it cannot be checkpointed.")
    regions, calls = [], []
    for call, module in enumerate(saved.call_module):
        if module in wanted and saved.call_saves[call][0] < saved.call_saves[call][1]:
            region = _reentrant_region(graph, call) if reentrant else _region(graph, call)
            if reentrant and regions and region.begin < regions[-1].end:
                raise InputError(f"Module '{wanted[module]}' lies inside another one: reentrant checkpoints cannot.")
            regions.append(region)
            calls.append(call)
    return _nested(graph, regions, calls)


def _nested(graph: StepGraph, regions: list[Region], calls: list[int]) -> list[Region]:
    """The regions with what lies inside one another settled, innermost first; see Note [Nested]."""
    saved, regions = graph.saved, list(regions)
    parent = _parents(regions)
    for outer in reversed(range(len(regions))):
        children = [index for index, above in enumerate(parent) if above == outer]
        if not children:
            continue
        region = replace(regions[outer], inner=tuple(regions[child].saves for child in children))
        own = region.own_saves
        wants = [(saved.unpacked_tick[save], saved.unpacked[save]) for save in own if saved.unpacked[save] >= 0]
        stops = [(saved.packed_tick[save], saved.packed[save]) for save in own]
        overs = [(saved.released_tick[save], saved.released[save]) for save in own]
        for_inner, to_the_end = [], set()
        for child in children:
            inner, keywords = regions[child], set(saved.call_keywords[calls[child]])
            handed_in = set(saved.call_inputs[calls[child]]) - keywords
            regions[child] = replace(inner, inputs=tuple(keywords), handed_in=tuple(handed_in))
            overs.append(inner.over)
            to_the_end |= keywords
            if handed_in:
                for_inner += [kept for kept in inner.kept_for_inner if kept[0] in handed_in]
                stops.append((saved.call_ticks[calls[child]][0], inner.begin))
                if inner.wanted is not None:
                    wants.append((inner.wanted_tick, inner.wanted))
                    after = math.floor(inner.wanted_tick) + 1
                    for_inner += [(row, after, inner.wanted) for row in handed_in]
                for_inner += [
                    (row, tick, count)
                    for save, count, tick in saved.ghosts
                    if save in inner.saves and (row := graph.value_storage[saved.value[save]]) in handed_in
                ]
        wanted_tick, wanted = min(wants, default=(0, None))
        stop_tick, stop = max(stops)
        regions[outer] = replace(
            region,
            wanted=wanted,
            wanted_tick=wanted_tick - _JUST_BEFORE,  # the inner region's recompute, which its inputs start
            stop=stop,
            stop_tick=stop_tick,
            over=max(overs),
            kept_for_inner=tuple(for_inner),
            kept_to_its_end=tuple(to_the_end),
        )
    return regions


def _parents(regions: list[Region]) -> list[int]:
    """For each region, in order of calls, the innermost one around it, -1 for none."""
    parents, open_regions = [], []
    for index, region in enumerate(regions):
        while open_regions and regions[open_regions[-1]].end <= region.begin:
            open_regions.pop()
        parents.append(open_regions[-1] if open_regions else -1)
        open_regions.append(index)
    return parents


def _region(graph: StepGraph, call: int) -> Region:
    saved = graph.saved
    begin, end = saved.call_ops[call]
    saves = range(*saved.call_saves[call])
    read = [(saved.unpacked_tick[save], saved.unpacked[save]) for save in saves if saved.unpacked[save] >= 0]
    wanted_tick, wanted = min(read, default=(-1, None))
    stop_tick = saved.packed_tick[saves[-1]]
    return Region(
        begin=begin,
        end=end,
        saves=saves,
        stop=saved.packed[saves[-1]],
        stop_tick=stop_tick,
        wanted=wanted,
        wanted_tick=wanted_tick,
        over=max((saved.released_tick[save], saved.released[save]) for save in saves),
        inputs=saved.call_inputs[call],
        recast=_recast(graph, begin, saved.call_ticks[call][0], stop_tick),
    )


def _recast(graph: StepGraph, begin: int, first_tick: int, stop_tick: int) -> tuple[tuple[int, int, int, int], ...]:
    """Casts made before a region that it found in autocast's cache; see Note [Autocast]."""
    reuses = graph.saved.cast_reuses
    found: dict[int, tuple[int, int, int, int]] = {}
    for row, at, tick in reuses[bisect_left(reuses, first_tick, key=lambda reuse: reuse[2]) :]:
        if tick > stop_tick:
            break
        if graph.birth[row] < begin:
            found.setdefault(row, (row, at, tick, graph.birth[row]))
    return tuple(found.values())


def _reentrant_region(graph: StepGraph, call: int) -> Region:
    """See Note [Reentrant]."""
    saved, plain = graph.saved, _region(graph, call)
    first, last = np.searchsorted(saved.backward_of_sorted[0], [plain.begin, plain.end])
    operations = saved.backward_of_sorted[1][first:last]
    events = [(plain.wanted_tick, plain.wanted)] if plain.wanted is not None else []
    # The operation itself, and what it allocates, comes after the recompute.
    events += [(saved.op_tick[operation] - _JUST_BEFORE, int(operation)) for operation in operations]
    if not events:
        return replace(plain, reentrant=True)
    wanted_tick, wanted = min(events)
    ends = [plain.over, *((saved.op_tick[operation], int(operation) + 1) for operation in operations)]
    reads = {
        graph.value_storage[value] for node in operations for value in values_in((graph.args[node], graph.kwargs[node]))
    }
    gradients = {row for row in reads if graph.phase[graph.birth[row]] == Phase.BACKWARD and graph.birth[row] < wanted}
    return replace(
        plain,
        reentrant=True,
        stop=plain.end,
        stop_tick=saved.call_ticks[call][1],
        wanted=wanted,
        wanted_tick=wanted_tick,
        over=max(ends),
        inputs=tuple({*plain.inputs, *gradients}),
        keywords=saved.call_keywords[call],
        graph_over=_graph_over(graph, plain.begin),
        recast=_recast(graph, plain.begin, *saved.call_ticks[call]),
    )


def _graph_over(graph: StepGraph, operation: int) -> tuple[int, int]:
    """(tick, operations recorded) when the autograd graph of a forward operation goes: after its loss's backward."""
    births = [graph.birth[loss] for loss in graph.saved.losses]
    operations, tick = graph.saved.graph_ends[bisect_left(births, operation)]
    return tick, operations


def keeping(graph: StepGraph, regions: Iterable[Region], operations: Iterable[int]) -> list[Region]:
    """The regions with those of these operations kept that lie in them.

    Raises InputError for an operation that makes no storage of its own, and for one whose output is written in place
    before the recompute takes it out of the cache.
    """
    operations = sorted(operations)
    in_place = {index for index, name in enumerate(graph.op_names) if _writes_in_place(name)}
    writes = [value for value, node in enumerate(graph.value_node) if graph.op[node] in in_place]
    chosen = []
    for region in regions:
        first, last = bisect_left(operations, region.begin), bisect_left(operations, region.end)
        region = replace(region, kept=tuple(operations[first:last]))
        _check_kept(graph, region, writes)
        chosen.append(region)
    return chosen


def _check_kept(graph: StepGraph, region: Region, writes: list[int]) -> None:
    """`writes` are the values that operators writing in place return."""
    kept, left, made_by = set(region.kept), set(region.left_in_cache), {}
    for value in range(bisect_left(graph.value_node, region.begin), bisect_left(graph.value_node, region.end)):
        operation, row = graph.value_node[value], graph.value_storage[value]
        if operation not in kept:
            continue
        if graph.birth[row] != operation:
            raise InputError(
                f"Selective checkpointing cannot save '{_op_name(graph, operation)}': it returns a view or writes in "
                "place, so there is nothing of its own to save. Name operators that return new tensors."
            )
        if operation not in left:
            made_by[row] = operation
    for value in writes:
        operation, writer = made_by.get(graph.value_storage[value]), graph.value_node[value]
        if operation is not None and operation < writer < region.wanted:
            raise InputError(
                f"Selective checkpointing cannot save '{_op_name(graph, operation)}': '{_op_name(graph, writer)}' "
                "writes its output in place, and torch.utils.checkpoint refuses a cached tensor that has been mutated."
            )


def _op_name(graph: StepGraph, operation: int) -> str:
    return graph.op_names[graph.op[operation]]


def _writes_in_place(op_name: str) -> bool:
    packet, _, overload = op_name.rpartition(".")
    return packet.endswith("_") or overload.endswith("out")
