"""Rewrite a recorded step as if regions of its forward ran under torch.utils.checkpoint (non-reentrant).

What it changes: a checkpointed region keeps its inputs instead of what its operations save; when backward first reads
one of those, the region's operations run again, up to the one that saved last (early stop), and what they save lives
until backward has used it. Outputs of operations that a region keeps (selective checkpointing) are cached instead: see
Note [Kept operations].
Where each byte comes from: sizes, and the instants at which Python lets go of a tensor and at which backward reads and
releases a saved one, are those of the trace (tracer/saved_tensors.py).
Not modelled: offload.
Sources: torch/utils/checkpoint.py, _checkpoint_without_reentrant_generator, _checkpoint_hook, _recomputation_hook,
_CachingTorchDispatchMode, _CachedTorchDispatchMode.

Note [Kept operations]
    The forward puts all outputs of a kept operation into a cache, whoever needs them. The recompute takes them out in
    the place of running the operation; from there on they live as what the operation would have made: until Python lets
    go of them, at the latest at the early stop, or until backward has read what was saved of them. What lies behind the
    early stop, or belongs to a region that backward never wants, stays in the cache until the region's last save is
    released. So a kept operation's storages are the forward's own, with a later death, and none is made again.
    A view's cache entry would be the storage of whatever it is a view of, and which of two storages a tensor of the
    recompute holds is not recorded: operations that make no storage of their own are refused. So are operations whose
    output is written in place before it is taken out: the library raises in backward then.

Note [Nested]
    A region inside another one: its positional inputs are saved for the outer region, which makes them again; its
    keyword arguments are held by its closure. When backward wants the inner region, its inputs start the outer one's
    recompute, in which the inner region runs as in forward, keeping nothing; then the inner one runs again. The outer
    recompute stops where the last tensor was saved for itself, an inner region's input counting as one.

Note [Autocast]
    Casts of weights that autocast caches live until the forward's autocast region ends, those of a recompute until the
    recompute ends: torch.utils.checkpoint runs it in an autocast region of its own. So they are no outputs of a region;
    and a region that found in the cache what was made before it, for a weight that several share, makes it again.

Note [Reentrant]
    A reentrant checkpoint is one node of autograd's graph. Before the first backward operation of the region it runs
    the whole region again, with grad and without an early stop, and then a backward of its own through what it made: so
    recomputed tensors are saved variables and live until their node is released, and the region's outputs and their
    gradients until that backward is over. Keyword arguments are held by the node's closure, not as saved variables:
    they live as long as the graph does, that is, until the loop lets go of the loss. Source: CheckpointFunction in
    torch/utils/checkpoint.py.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from metapeak.tracer.errors import InputError
from metapeak.tracer.graph import StepGraph, values_in
from metapeak.tracer.liveness import Category, Liveness, Phase

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


def checkpointed(graph: StepGraph, regions: Iterable[Region]) -> Liveness:
    """The liveness of the step with these regions checkpointed; the plain step's for no regions.

    Needs a graph recorded with `decouple_saves`. Operations that run again are inserted before the backward operation
    that wants them, marked as recompute.
    """
    regions = list(regions)
    plain, holds, timeline = graph.liveness(), Holds.of(graph), _Timeline(regions)
    region_of_save = np.full(len(holds.save_row), -1, dtype=np.int64)
    region_begin = np.array([region.begin for region in regions], dtype=np.int64)
    for index, region in enumerate(regions):
        region_of_save[region.saves.start : region.saves.stop] = index  # inner regions come later

    # Storages of the plain step: what a region saves of its own dies with Python's references.
    outside = region_of_save < 0
    if regions:
        outside |= plain.birth[holds.save_row] < region_begin[region_of_save]
        for region in regions:
            again = region.handed_in + region.recast_rows  # comes from the recompute around it, or is cast again
            if again:
                part = slice(region.saves.start, region.saves.stop)
                outside[part] &= ~np.isin(holds.save_row[part], again)
    death = latest(holds.eager, holds.save_row[outside], holds.release[outside])
    of_ghost = outside[holds.ghost_save]
    death = latest(death, holds.save_row[holds.ghost_save[of_ghost]], holds.ghost[of_ghost])
    for region in regions:
        inputs = np.array(region.inputs, dtype=np.int64)
        death = latest(death, inputs, np.tile(region.over, (len(inputs), 1)))
        keywords = np.array(region.keywords, dtype=np.int64)
        death = latest(death, keywords, np.tile(region.graph_over, (len(keywords), 1)))
        if region.left_in_cache:
            left = np.flatnonzero(np.isin(plain.birth, region.left_in_cache))
            death = latest(death, left, np.tile(region.over, (len(left), 1)))
    rows = [np.arange(len(plain.birth))]
    births = [plain.birth + timeline.shift(holds.op_tick[plain.birth])]
    deaths = [death[:, 1] + timeline.shift(death[:, 0])]
    for region in regions:
        if region.wanted is not None:
            copies, start = recomputed(plain, holds, region), timeline.start(region)
            moved = copies.after[:, 1] + timeline.shift(copies.after[:, 0])
            end = np.where(copies.lives_on, np.maximum(start + copies.death, moved), start + copies.death)
            cached = np.isin(plain.birth[copies.row], region.kept)
            deaths[0][copies.row[cached]] = np.maximum(deaths[0][copies.row[cached]], end[cached])
            rows.append(copies.row[~cached])
            births.append(start + copies.birth[~cached])
            deaths.append(end[~cached])

    row = np.concatenate(rows)
    liveness = replace(
        _with_operations(plain, regions, timeline),
        birth=np.concatenate(births).astype(np.int32),
        death=np.concatenate(deaths).astype(np.int32),
        **{name: getattr(plain, name)[row] for name in ("nbytes", "category", "module", "source", "dtype")},
        shapes=[plain.shapes[index] for index in row],
    )
    liveness = replace(liveness, category=settle_categories(liveness))
    liveness.lint()
    return liveness


class _Timeline:
    """Where events of the plain step lie once recomputes are inserted."""

    def __init__(self, regions: list[Region]):
        inserted = sorted((region.wanted_tick, region.length) for region in regions if region.length)
        self._ticks = np.array([tick for tick, _ in inserted], dtype=np.float64)
        self._before = np.concatenate([[0], np.cumsum([length for _, length in inserted], dtype=np.int64)])

    def shift(self, ticks):
        """Operations inserted before events of these ticks."""
        return self._before[np.searchsorted(self._ticks, ticks, side="left")].astype(np.int64)

    def start(self, region: Region) -> int:
        """The new index of the first operation of a region's recompute."""
        return region.wanted + int(self.shift(region.wanted_tick))


@dataclass(frozen=True, kw_only=True, eq=False)
class Holds:
    """Who holds which storage until when; every `until` is (tick, operations recorded by then), so the latest wins.

    `eager` [storages, 2]: Python's last reference. `save_row` [saves]: the storage of each save; `release` [saves, 2];
    `was_read` [saves]. `ghost_save` [ghosts] and `ghost` [ghosts, 2]: what backward read in place of a save.
    `casts`: storages that autocast's cache held.
    """

    eager: np.ndarray
    save_row: np.ndarray
    release: np.ndarray
    was_read: np.ndarray
    ghost_save: np.ndarray
    ghost: np.ndarray
    op_tick: np.ndarray
    casts: np.ndarray

    @classmethod
    def of(cls, graph: StepGraph) -> Holds:
        saved = graph.saved
        ghosts = np.array(saved.ghosts, dtype=np.int64).reshape(-1, 3)
        value_storage = np.array(graph.value_storage, dtype=np.int64)
        return cls(
            eager=np.stack([saved.eager_death_tick, saved.eager_death], axis=1).astype(np.int64),
            save_row=value_storage[np.array(saved.value, dtype=np.int64)],
            release=np.stack([saved.released_tick, saved.released], axis=1).astype(np.int64),
            was_read=np.array(saved.unpacked) >= 0,
            ghost_save=ghosts[:, 0],
            ghost=ghosts[:, [2, 1]],
            op_tick=np.array(saved.op_tick, dtype=np.int64),
            casts=np.array(saved.casts, dtype=np.int64),
        )


def latest(death: np.ndarray, rows: np.ndarray, until: np.ndarray) -> np.ndarray:
    """`death` with each of `rows` held until the given (tick, operations) if that is later."""
    death = death.copy()
    order = np.argsort(until[:, 0], kind="stable")
    rows, until = rows[order], until[order]
    later = until[:, 0] > death[rows, 0]
    death[rows[later]] = until[later]  # the last assignment to a row is the latest
    return death


@dataclass(frozen=True, kw_only=True, eq=False)
class Copies:
    """The storages that a recompute makes again or takes out of its cache: `row` (of the plain step), `birth` and
    `death` counted in operations from the start of the recompute (death at most its length), and `after` (tick,
    operations recorded) until when backward holds those that it wants; (-1, -1) for the others.
    """

    row: np.ndarray
    birth: np.ndarray
    death: np.ndarray
    after: np.ndarray

    @property
    def lives_on(self) -> np.ndarray:
        return self.after[:, 0] >= 0


def recomputed(plain: Liveness, holds: Holds, region: Region) -> Copies:
    """What the recompute of a region makes again or takes out of its cache."""
    rows = np.flatnonzero((region.begin <= plain.birth) & (plain.birth < region.stop))
    position = np.full(len(plain.birth), -1, dtype=np.int64)
    position[rows] = np.arange(len(rows))
    saves = region.own_saves
    # What autograd saved and let go of before backward (a result that is only used detached, as DoRA's weight norm) is
    # held by the recompute's own graph for as long, at most to the early stop; in forward the hooks hold nothing.
    dropped = saves[holds.release[saves, 0] < region.wanted_tick]
    eager = latest(holds.eager, holds.save_row[dropped], holds.release[dropped]) if len(dropped) else holds.eager
    # At the early stop everything that Python still holds goes.
    inside = eager[rows, 0] < region.stop_tick
    inside &= ~np.isin(rows, region.kept_to_its_end)
    death = np.where(inside, region.since_start(eager[rows, 1], eager[rows, 0]), region.length)
    birth = region.since_start(plain.birth[rows], holds.op_tick[plain.birth[rows]])
    recast = np.array([[row, at, tick] for row, at, tick, _ in region.recast], dtype=np.int64).reshape(-1, 3)
    rows = np.concatenate([rows, recast[:, 0]])
    position[recast[:, 0]] = np.arange(len(inside), len(rows))
    birth = np.concatenate([birth, region.since_start(recast[:, 1], recast[:, 2])])
    death = np.concatenate([death, np.full(len(recast), region.length)])
    inside = np.concatenate([inside, np.ones(len(recast), dtype=bool)]) | np.isin(rows, holds.casts)

    after = np.full((len(rows), 2), -1, dtype=np.int64)
    # A recomputed tensor leaves the checkpoint's hands when backward reads it, before the node is released; one that
    # backward does not read stays until then.
    unread = saves if region.reentrant else saves[~holds.was_read[saves]]
    ghosts = np.flatnonzero(np.isin(holds.ghost_save, saves))
    inner = np.array(region.kept_for_inner, dtype=np.int64).reshape(-1, 3)
    storages = np.concatenate([holds.save_row[unread], holds.save_row[holds.ghost_save[ghosts]], inner[:, 0]])
    until = np.concatenate([holds.release[unread], holds.ghost[ghosts], inner[:, 1:]])
    held = (position[storages] >= 0) & (until[:, 0] > region.wanted_tick)
    after = latest(after, position[storages[held]], until[held])
    if region.reentrant:
        outputs = np.flatnonzero(~inside)
        after = latest(after, outputs, np.tile(region.over, (len(outputs), 1)))
    return Copies(row=rows, birth=birth, death=death, after=after)


def _with_operations(plain: Liveness, regions: list[Region], timeline: _Timeline) -> Liveness:
    """The operation columns with the recomputes inserted."""
    ordered = sorted((region for region in regions if region.length), key=lambda region: region.wanted_tick)
    source = np.arange(plain.num_ops)
    pieces, recompute, position = [], [], 0
    for region in ordered:
        pieces += [source[position : region.wanted], region.operations]
        recompute += [np.zeros(region.wanted - position, bool), np.ones(region.length, bool)]
        position = region.wanted
    pieces.append(source[position:])
    recompute.append(np.zeros(plain.num_ops - position, bool))
    source, again = np.concatenate(pieces), np.concatenate(recompute)
    phase = plain.op_phase[source]
    phase[again] = Phase.BACKWARD
    return replace(
        plain,
        op=plain.op[source],
        op_phase=phase,
        op_iteration=plain.op_iteration[source],
        op_module=plain.op_module[source],
        op_recompute=plain.op_recompute[source] | again,
        op_node=plain.op_node[source],
    )


def settle_categories(liveness: Liveness) -> np.ndarray:
    """Activations outlive the forward or the recompute that made them, temporaries do not; the rest stays."""
    category = liveness.category.copy()
    forward = liveness.op_phase == Phase.FORWARD
    made = forward | liveness.op_recompute
    run = np.cumsum(np.diff(made.astype(np.int8) + 2 * liveness.op_recompute, prepend=-1) != 0)
    last = np.zeros(run.max() + 1, dtype=np.int64)
    np.maximum.at(last, run, np.arange(liveness.num_ops) + 1)
    settled = np.isin(category, [Category.ACTIVATION, Category.TEMPORARY]) & made[liveness.birth]
    outlives = liveness.death > last[run[liveness.birth]]
    category[settled & outlives] = Category.ACTIVATION
    category[settled & ~outlives] = Category.TEMPORARY
    return category
