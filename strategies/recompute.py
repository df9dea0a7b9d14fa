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

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from metapeak.strategies.regions import Region
from metapeak.tracer.graph import StepGraph
from metapeak.tracer.liveness import Category, Liveness, Phase


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
        **plain.of_rows(row),
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
