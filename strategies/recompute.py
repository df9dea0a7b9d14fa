"""Rewrite a recorded step as if regions of its forward ran under torch.utils.checkpoint (non-reentrant).

What it changes: a checkpointed region keeps its inputs instead of what its operations save; when backward first reads
one of those, the region's operations run again, up to the one that saved last (early stop), and what they save lives
until backward has used it.
Where each byte comes from: sizes, and the instants at which Python lets go of a tensor and at which backward reads and
releases a saved one, are those of the trace (tracer/saved_tensors.py).
Not modelled: nested regions, reentrant checkpoints, offload.
Sources: torch/utils/checkpoint.py, _checkpoint_without_reentrant_generator, _checkpoint_hook, _recomputation_hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from metapeak.tracer.errors import InputError
from metapeak.tracer.graph import StepGraph
from metapeak.tracer.liveness import Category, Liveness, Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """One call of a checkpointed module: its operations [begin, end), its saves, and when backward wants it back.

    `stop` is the operation before which the recompute ends; `wanted` (and its tick) the operation before which
    backward first reads a save, None when it reads none; `over` (tick, operations recorded) when the last of its saves
    is released.
    """

    begin: int
    end: int
    saves: range
    stop: int
    stop_tick: int
    wanted: int | None
    wanted_tick: int
    over: tuple[int, int]
    inputs: tuple[int, ...]

    @property
    def length(self) -> int:
        """Operations that run again."""
        return self.stop - self.begin if self.wanted is not None else 0


def regions_of(graph: StepGraph, modules: Iterable[str]) -> list[Region]:
    """The calls of these modules that saved something, in order of the trace.

    Raises InputError for a module that the step never called and for regions inside one another.
    """
    saved = graph.saved
    wanted = {graph.module_names.index(name) if name in graph.module_names else -1: name for name in modules}
    if -1 in wanted:
        raise InputError(f"The model has no module '{wanted[-1]}'.")
    called = {saved.call_module[call] for call in range(len(saved.call_module))}
    for index, name in wanted.items():
        if index not in called:
            raise InputError(f"Module '{name}' is not called in the forward pass, so it cannot be checkpointed.")
    regions = []
    for call, module in enumerate(saved.call_module):
        if module in wanted and saved.call_saves[call][0] < saved.call_saves[call][1]:
            region = _region(graph, call)
            if regions and region.begin < regions[-1].end:
                raise InputError(f"Module '{wanted[module]}' lies inside another checkpointed module.")
            regions.append(region)
    return regions


def _region(graph: StepGraph, call: int) -> Region:
    saved = graph.saved
    begin, end = saved.call_ops[call]
    saves = range(*saved.call_saves[call])
    read = [(saved.unpacked_tick[save], saved.unpacked[save]) for save in saves if saved.unpacked[save] >= 0]
    wanted_tick, wanted = min(read, default=(-1, None))
    return Region(
        begin=begin,
        end=end,
        saves=saves,
        stop=saved.packed[saves[-1]],
        stop_tick=saved.packed_tick[saves[-1]],
        wanted=wanted,
        wanted_tick=wanted_tick,
        over=max((saved.released_tick[save], saved.released[save]) for save in saves),
        inputs=saved.call_inputs[call],
    )


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
        region_of_save[region.saves.start : region.saves.stop] = index

    # Storages of the plain step: what a region saves of its own dies with Python's references.
    outside = region_of_save < 0
    if regions:
        outside |= plain.birth[holds.save_row] < region_begin[region_of_save]
    death = latest(holds.eager, holds.save_row[outside], holds.release[outside])
    of_ghost = outside[holds.ghost_save]
    death = latest(death, holds.save_row[holds.ghost_save[of_ghost]], holds.ghost[of_ghost])
    for region in regions:
        inputs = np.array(region.inputs, dtype=np.int64)
        death = latest(death, inputs, np.tile(region.over, (len(inputs), 1)))
    rows = [np.arange(len(plain.birth))]
    births = [plain.birth + timeline.shift(holds.op_tick[plain.birth])]
    deaths = [death[:, 1] + timeline.shift(death[:, 0])]
    for region in regions:
        if region.length:
            copies, start = recomputed(plain, holds, region), timeline.start(region)
            moved = copies.after[:, 1] + timeline.shift(copies.after[:, 0])
            rows.append(copies.row)
            births.append(start + copies.birth)
            deaths.append(np.where(copies.lives_on, np.maximum(start + copies.death, moved), start + copies.death))

    row = np.concatenate(rows)
    liveness = replace(
        _with_operations(plain, regions, timeline),
        birth=np.concatenate(births).astype(np.int32),
        death=np.concatenate(deaths).astype(np.int32),
        **{name: getattr(plain, name)[row] for name in ("nbytes", "category", "module", "source", "dtype")},
        shapes=[plain.shapes[index] for index in row],
    )
    liveness = replace(liveness, category=_categories(liveness))
    liveness.lint()
    return liveness


class _Timeline:
    """Where events of the plain step lie once recomputes are inserted."""

    def __init__(self, regions: list[Region]):
        inserted = sorted((region.wanted_tick, region.length) for region in regions if region.length)
        self._ticks = np.array([tick for tick, _ in inserted], dtype=np.int64)
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
    """

    eager: np.ndarray
    save_row: np.ndarray
    release: np.ndarray
    was_read: np.ndarray
    ghost_save: np.ndarray
    ghost: np.ndarray
    op_tick: np.ndarray

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
    """The storages that a recompute makes again: `row` (of the plain step), `birth` and `death` counted in operations
    from the start of the recompute (death at most its length), and `after` (tick, operations recorded) until when
    backward holds those that it wants; (-1, -1) for the others.
    """

    row: np.ndarray
    birth: np.ndarray
    death: np.ndarray
    after: np.ndarray

    @property
    def lives_on(self) -> np.ndarray:
        return self.after[:, 0] >= 0


def recomputed(plain: Liveness, holds: Holds, region: Region) -> Copies:
    """What the recompute of a region makes again."""
    rows = np.flatnonzero((region.begin <= plain.birth) & (plain.birth < region.stop))
    position = np.full(len(plain.birth), -1, dtype=np.int64)
    position[rows] = np.arange(len(rows))
    # At the early stop everything that Python still holds goes.
    inside = holds.eager[rows, 0] < region.stop_tick
    death = np.where(inside, holds.eager[rows, 1] - region.begin, region.length)

    after = np.full((len(rows), 2), -1, dtype=np.int64)
    saves = np.arange(region.saves.start, region.saves.stop)
    # A recomputed tensor leaves the checkpoint's hands when backward reads it, before the node is released; one that
    # backward does not read stays until then.
    unread = saves[~holds.was_read[saves]]
    ghosts = np.flatnonzero((holds.ghost_save >= region.saves.start) & (holds.ghost_save < region.saves.stop))
    storages = np.concatenate([holds.save_row[unread], holds.save_row[holds.ghost_save[ghosts]]])
    until = np.concatenate([holds.release[unread], holds.ghost[ghosts]])
    held = (position[storages] >= 0) & (until[:, 0] > region.wanted_tick)
    after = latest(after, position[storages[held]], until[held])
    return Copies(row=rows, birth=plain.birth[rows] - region.begin, death=death, after=after)


def _with_operations(plain: Liveness, regions: list[Region], timeline: _Timeline) -> Liveness:
    """The operation columns with the recomputes inserted."""
    ordered = sorted((region for region in regions if region.length), key=lambda region: region.wanted_tick)
    source = np.arange(plain.num_ops)
    pieces, recompute, position = [], [], 0
    for region in ordered:
        pieces += [source[position : region.wanted], source[region.begin : region.stop]]
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
    )


def _categories(liveness: Liveness) -> np.ndarray:
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
