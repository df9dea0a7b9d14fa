"""A long schedule played over pieces that were recorded in a short one: every action's operations in the new order.

What it changes: one recorded run of a few microbatches on few ranks becomes any rank of a pipeline of any length.
Where each byte comes from: a short run of the same schedule class with this rank's own stages. Its first and last
microbatch stand for the first and the last, one in between for all others; a storage dies where it died there: in the
same action, in another action of its microbatch or of one a fixed number later, or at a point of the step.
Oracle: the real schedule on the phantom GPU (tests/agreement/distributed/test_played_pipelines.py).
Not played, but run whole: stages that FSDP gathers and lets go during the step (more than three stages a rank),
Megatron's groups of more microbatches than ranks, and DualPipeV, which changes the kind of its backwards from one
microbatch to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from metapeak.strategies.parallel.schedules import Schedule
from metapeak.tracer.graph import StepGraph
from metapeak.tracer.liveness import Category, Liveness

# Ranks of the short run: one with the first stage, one between, one with the last.
SHORT_PP = 3
# torch's _add_unshard_reshard keeps this many stages of a rank gathered.
MAX_ACTIVE_STAGES = 3

Region = tuple  # (iteration, kind, stage, microbatch); stage and microbatch -1 for start, end and what comes before


def short_run(schedule: Schedule, pp: int, microbatches: int) -> tuple[int, int] | None:
    """(pp, microbatches) of the short run that shows all that a long one has; None where the long one is no longer."""
    short = min(pp, SHORT_PP)
    count = 2 * short + 3 if schedule.name == "zbv" else max(short, 3)  # the first, the last, one for all others
    if (
        schedule.name == "dualpipev"
        or schedule.group
        or schedule.virtual > MAX_ACTIVE_STAGES
        or (count >= microbatches and short == pp)
    ):
        return None
    return (short, count) if count <= microbatches else None


def short_rank(rank: int, pp: int, short: int) -> int:
    """The rank of the short run that has what a rank of the long one has: the first, the last, or one between.

    >>> [short_rank(rank, 8, 3) for rank in range(8)]
    [0, 1, 1, 1, 1, 1, 1, 2]
    """
    if rank in (0, pp - 1):
        return 0 if rank == 0 else short - 1
    return min(rank, short - 2)


def order_of(schedule: Schedule, place: int, pp: int, microbatches: int) -> list[tuple[str, int, int]]:
    """(kind, stage, microbatch) of a rank's actions, as PipelineLoop notes them.

    Source: the order of torch's class; ScheduleGPipe and Schedule1F1B run a loop of their own, whose warm-up is
    min(microbatches, stages - stage) forwards.
    """
    if schedule.name == "1f1b":
        warm = min(microbatches, pp - place)
        actions = [("F", place, number) for number in range(warm)]
        for number in range(microbatches):
            actions.append(("B", place, number))
            if warm + number < microbatches:
                actions.append(("F", place, warm + number))
        return [*actions, ("R", place, -1)]
    from torch.distributed.pipelining.schedules import REDUCE_GRAD, _add_reduce_grad

    computed = [one for one in schedule.orders(pp, microbatches)[place] if one and one.computation_type != REDUCE_GRAD]
    actions = []
    for action in _add_reduce_grad(computed, microbatches):
        for one in action.sub_actions or (action,):
            reduces = one.computation_type == REDUCE_GRAD
            number = -1 if reduces else one.microbatch_index
            actions.append(("R" if reduces else one.computation_type.value, one.stage_index, number))
    return actions


class NotShown(Exception):
    """A short run does not show what the long one does: that has to be run itself."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """A liveness with its actions, as StepGraph.actions, and the short run's row of every storage."""

    liveness: Liveness
    actions: list[list]
    rows: np.ndarray

    def of_graph(self, graph: StepGraph) -> StepGraph:
        """The short run's graph with its sets of storages as rows of the played liveness."""

        def among(rows: set[int]) -> set[int]:
            return set(np.flatnonzero(np.isin(self.rows, list(rows))).tolist())

        return replace(graph, whole=among(graph.whole), unsharded=among(graph.unsharded), actions=self.actions)


def play(
    graph: StepGraph,
    liveness: Liveness,
    order: Sequence[tuple[str, int, int]],
    stages: dict[int, int],
    counts: tuple[int, int],
    names: Sequence[str],
) -> Played:
    """The long run.

    Arguments: a short run's graph and its liveness, the long run's order of actions in one step, its stages by those
    of the short run, microbatches of (the short, the long) run, and module names as the long run has them.
    Raises NotShown where the short run does not show what the long one does.
    """
    return _Player(graph, liveness, order, stages, counts).play(names)


class _Player:
    def __init__(self, graph, liveness, order, stages, counts):
        self.liveness, self.short, self.long = liveness, counts[0], counts[1]
        own = {stage: ours for ours, stage in stages.items()}
        self.stages = stages
        self.regions, self.edges = _regions(graph, liveness.num_ops)
        self.index = {region: number for number, region in enumerate(self.regions)}
        self.context = _contexts(self.regions)
        self.plan = self._plan([(kind, own[stage], number) for kind, stage, number in order])
        self.buffers = dict(map(tuple, graph.boundary_buffers))

    def _plan(self, order) -> list[tuple[Region, int]]:
        """(region of the long run, region of the short run that is played there), in order of time."""
        plan = [((0, "load", -1, -1), 0)]
        for iteration in sorted({region[0] for region in self.regions} - {0}):
            plan.append(((iteration, "start", -1, -1), self.index[iteration, "start", -1, -1]))
            around = [("start", -1), *((kind, stage) for kind, stage, _ in order), ("end", -1)]
            for place, (kind, stage, number) in enumerate(order):
                region = (iteration, kind, stage, number)
                plan.append((region, self._stands_for(region, (around[place], around[place + 2]))))
            plan.append(((iteration, "end", -1, -1), self.index[iteration, "end", -1, -1]))
        return plan

    def _stands_for(self, region: Region, context) -> int:
        """The region of the short run for one of the long: first for first, last for last, else like neighbours."""
        iteration, kind, stage, number = region
        between = 0 < number < self.long - 1
        others = range(1, self.short - 1) if between else [number if number <= 0 else self.short - 1]
        candidates = [one for other in others if (one := (iteration, kind, stage, other)) in self.index]
        if not candidates:
            raise NotShown(f"no {kind} of stage {stage} in the short run stands for microbatch {number}")
        same = [one for one in candidates if self.context[one] == context]
        after = [one for one in candidates if self.context[one][1] == context[1]]
        return self.index[(same or after or candidates)[0]]

    def play(self, names: Sequence[str]) -> Played:
        lengths = np.array([self.edges[piece + 1] - self.edges[piece] for _, piece in self.plan])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        where = {region: (int(start), int(length)) for (region, _), start, length in zip(self.plan, starts, lengths)}
        old = np.concatenate([np.arange(self.edges[piece], self.edges[piece + 1]) for _, piece in self.plan])
        rows, births, deaths = self._storages(starts, where, int(starts[-1]))
        column = self.liveness.of_rows(rows)
        sizes = column["nbytes"]
        inputs = (self.liveness.category[rows] == Category.INPUT) & (births < self.edges[1])
        sizes[inputs] = sizes[inputs] // self.short * self.long
        operations = ("op", "op_phase", "op_iteration", "op_module", "op_recompute", "op_node")
        played = replace(
            self.liveness,
            birth=births,
            death=deaths,
            shapes=[self.liveness.shapes[row] for row in rows],
            module_names=list(names),
            **column,
            **{name: getattr(self.liveness, name)[old] for name in operations},
        )
        actions = [
            [iteration, kind, self.stages.get(stage, -1), number, int(start)]
            for ((iteration, kind, stage, number), _), start in zip(self.plan, starts)
            if kind != "load"
        ]
        return Played(liveness=played, actions=actions, rows=rows)

    def _storages(self, starts, where, end) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(row of the short run, birth, death) of every storage of the long run."""
        edges = np.asarray(self.edges)
        birth, death = self.liveness.birth.astype(np.int64), self.liveness.death.astype(np.int64)
        born = np.searchsorted(edges, birth, side="right") - 1
        # What is freed between two operations is freed in the region of the first.
        died = np.searchsorted(edges, death - 1, side="right") - 1
        died = np.maximum(died, born)
        by_region: list[np.ndarray] = [np.flatnonzero(born == piece) for piece in range(len(self.regions))]
        rows, births, deaths = [], [], []
        for (region, piece), start in zip(self.plan, starts.tolist()):
            here = by_region[piece]
            if not len(here):
                continue
            new_birth = birth[here] - edges[piece] + start
            new_death = death[here] - edges[piece] + start
            later = died[here] != piece
            for position in np.flatnonzero(later).tolist():
                row = int(here[position])
                new_death[position] = self._death(row, int(death[row]), int(died[row]), region, piece, where, end)
            rows.append(here)
            births.append(new_birth)
            deaths.append(new_death)
            if region[1] == "start":
                more = self._more_buffers(region, start, where, end)
                for column, added in zip((rows, births, deaths), more):
                    column.append(np.asarray(added, dtype=np.int64))
        return np.concatenate(rows), np.concatenate(births), np.concatenate(deaths)

    def _more_buffers(self, region, start, where, end):
        """Buffers of the microbatches that only the long run has, as those of one in between."""
        found: tuple[list, list, list] = ([], [], [])
        for row, number in self.buffers.items():
            birth, death = int(self.liveness.birth[row]), int(self.liveness.death[row])
            piece = int(np.searchsorted(self.edges, birth, side="right")) - 1
            if number != 1 or self.regions[piece] != region:
                continue
            died = int(np.searchsorted(self.edges, death - 1, side="right")) - 1
            for other in range(self.short - 1, self.long - 1):
                found[0].append(row)
                found[1].append(birth - self.edges[piece] + start)
                found[2].append(self._place(death, died, other, number, region[0], where, end))
        return found

    def _death(self, row, death, died, region, piece, where, end) -> int:
        own = self.regions[piece][3]
        number = region[3]
        if row in self.buffers:
            own = self.buffers[row]
            number = own if own < self.short - 1 else self.long - 1
        return self._place(death, died, number, own, region[0], where, end)

    def _place(self, death: int, died: int, number: int, own: int, birth: int, where, end: int) -> int:
        """Where in the long run a storage of microbatch `number` dies, whose like of microbatch `own` died there."""
        if death > self.edges[-1]:
            return end + 1
        iteration, kind, stage, other = self.regions[died]
        if other >= 0:
            if own < 0 or (iteration != birth and other != own):
                other = other if other < self.short - 1 else self.long - 1  # at the same end of the step
            else:
                other = number + other - own
        target = where.get((iteration, kind, stage, other))
        if target is None:
            raise NotShown(f"the short run frees something in {kind}{other}, which this schedule has not")
        # Pieces of one kind may differ in operations without memory: from the end, where it was there.
        return target[0] + min(death - self.edges[died], target[1])


def _regions(graph: StepGraph, num_ops: int) -> tuple[list[Region], list[int]]:
    """(regions in order of time, first operation of each and the number of operations)."""
    regions: list[Region] = [(0, "load", -1, -1)]
    edges = [0]
    for iteration, kind, stage, number, begin in graph.actions:
        regions.append((iteration, kind, stage, number))
        edges.append(begin)
    return regions, [*edges, num_ops]


def _contexts(regions: Sequence[Region]) -> dict[Region, tuple]:
    around = [("load", -1), *((region[1], region[2]) for region in regions), ("load", -1)]
    return {region: (around[place], around[place + 2]) for place, region in enumerate(regions)}
