"""The recorded step of every rank of a layout: traced, or for a long pipeline played over a short one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from metapeak.strategies.base import Strategy
from metapeak.strategies.parallel.layout import Layout
from metapeak.strategies.parallel.pipeline import PipelineParallel, pipeline_of
from metapeak.strategies.parallel.played import NotShown, order_of, play, short_rank, short_run
from metapeak.tracer.graph import StepGraph
from metapeak.tracer.liveness import Liveness

# FSDP2 keeps the buffer of its last all-gather until the next one (FSDPCommContext.all_gather_state); which
# microbatch's forward that is differs between a short and a long run of several stages a rank.
BUFFER_KEPT = (
    "the schedule of several sharded stages a rank is played over a short run: one unit's all-gather buffer may be "
    "counted at another microbatch than a whole run has it at, so that the peak is at most that buffer too high"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """What one rank did: the recorded graph (of the short run, where it was played), what answering it needed, and its
    liveness, rewritten by the strategies.
    """

    graph: StepGraph
    answered: dict[str, int]
    liveness: Liveness
    actions: list[list]


@dataclass(kw_only=True, eq=False)
class Traces:
    """Traces ranks of a layout. `record(strategies, layout, rank)` runs the step as a rank: (graph, answered)."""

    layout: Layout | None
    strategies: Sequence[Strategy]
    record: Callable[..., tuple[StepGraph, dict[str, int]]]
    _short: dict[Any, tuple] = field(default_factory=dict)

    def of(self, rank: int, module: Any) -> Traced:
        """The step as `rank`, whose whole module is `module`."""
        pipeline = pipeline_of(self.strategies) if self.layout is not None else None
        size = self._short_run(pipeline)
        if size is not None:
            with contextlib.suppress(NotShown):
                return self._played(pipeline, size, rank, module)
        return self.rewritten(*self.record(self.strategies, self.layout, rank))

    def rewritten(self, graph: StepGraph, answered: dict[str, int]) -> Traced:
        """A recorded step with what the strategies make of its liveness."""
        liveness = graph.liveness()
        for strategy in self.strategies:
            liveness = strategy.rewrite(liveness, graph)
        return Traced(graph=graph, answered=answered, liveness=liveness, actions=graph.actions)

    def _short_run(self, pipeline: PipelineParallel | None) -> tuple[int, int] | None:
        if pipeline is None or any(one.rewrites for one in self.strategies) or pipeline.layout.cp > 1:
            return None  # under cp a rank's part of the batch is made in every step, as long as the run
        return short_run(pipeline.schedule, pipeline.layout.pp, pipeline.count)

    def _played(self, pipeline: PipelineParallel, size: tuple[int, int], rank: int, module: Any) -> Traced:
        pp, microbatches = size
        schedule, layout = pipeline.schedule, pipeline.layout
        place = layout.coordinates(rank)["pp"]
        like, peers = short_rank(place, layout.pp, pp), layout.world_size // layout.pp
        blocks, ranges = pipeline.blocks(module)
        stages = dict(zip(schedule.stages_of(like, pp), schedule.stages_of(place, layout.pp)))
        key = (like * peers + rank % peers, tuple(len(ranges[stage]) for stage in stages.values()))
        if key not in self._short:
            short = replace(
                pipeline,
                layout=replace(layout, pp=pp),
                microbatches=microbatches,
                own={ours: ranges[stage] for ours, stage in stages.items()},
            )
            strategies = [short if one is pipeline else _laid_out(one, short.layout) for one in self.strategies]
            graph, answered = self.record(strategies, short.layout, key[0])
            self._short[key] = (graph, answered, graph.liveness(), short.own)
        graph, answered, liveness, own = self._short[key]
        shift = {ours: ranges[stages[ours]][0] - own[ours][0] for ours in stages}
        played = play(
            graph,
            liveness,
            order_of(schedule, place, layout.pp, pipeline.count),
            stages,
            (microbatches, pipeline.count),
            [_renamed(name, stages, shift, blocks[0].rpartition(".")[0]) for name in graph.module_names],
        )
        if schedule.virtual > 1 and layout.dp_shard > 1:
            answered = {**answered, BUFFER_KEPT: 1}
        return Traced(graph=played.of_graph(graph), answered=answered, liveness=played.liveness, actions=played.actions)


def _laid_out(strategy: Strategy, layout: Layout) -> Strategy:
    return replace(strategy, layout=layout) if strategy.layout is not None else strategy


def _renamed(name: str, stages: dict[int, int], shift: dict[int, int], owner: str) -> str:
    """A module's path in the long run: its stage's number, and those of its blocks."""
    found = re.match(r"stage(\d+)(.*)", name)
    if not found:
        return name
    ours, rest = int(found[1]), found[2]
    inner = re.match(rf"\.{re.escape(owner)}\.(\d+)(.*)", rest)
    if inner:
        rest = f".{owner}.{int(inner[1]) + shift[ours]}{inner[2]}"
    return f"stage{stages[ours]}{rest}"
