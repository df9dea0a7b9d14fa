"""Which ranks of a layout differ, and the process group in which one of them is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from metapeak.strategies.base import Strategy
from metapeak.strategies.parallel.layout import Layout
from metapeak.tracer.errors import InputError

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.engine import MakeEngine
    from metapeak.tracer.spec import StepSpec

# Classes of ranks of which each is traced; of more, the first and the last are.
TRACED_CLASSES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RankClass:
    """`count` ranks that hold shards of the same sizes, by the first of them."""

    rank: int
    count: int


def layout_of(strategies: Sequence[Strategy]) -> Layout | None:
    """The layout of the strategies that spread the job, None for one GPU. Raises InputError for two that differ."""
    layouts = {strategy.layout for strategy in strategies if strategy.layout is not None}
    if len(layouts) > 1:
        raise InputError(f"Strategies with different layouts: {', '.join(map(str, layouts))}.")
    return layouts.pop() if layouts else None


def distinct_ranks(
    layout: Layout | None, module: torch.nn.Module, strategies: Sequence[Strategy]
) -> tuple[list[RankClass], tuple[str, ...]]:
    """(classes of ranks to trace, first rank first, what the report has to say about those that are not).

    Stages of a pipeline differ, and sharding by parameters (`shards_dim_0`) makes ranks differ: its last ranks have
    less of a dimension that the degree does not divide. So does a place in a ring (`ranks_by_sequence_part`). The first
    of a stage's ranks never has less of the parameters than another one.
    """
    if layout is None:
        return [RankClass(rank=0, count=1)], ()
    if layout.pp > 1:  # every stage's ranks are of their own, `stage` apart
        inner, notes = distinct_ranks(replace(layout, pp=1), module, strategies)
        stage = layout.world_size // layout.pp
        ranks = [replace(one, rank=one.rank + place * stage) for place in range(layout.pp) for one in inner]
        return ranks, notes
    sizes: set[int] = set()
    expert_sizes: set[int] = set()
    if any(getattr(strategy, "shards_dim_0", False) for strategy in strategies):
        sizes = {parameter.shape[0] for parameter in module.parameters() if parameter.dim()}
        expert_sizes = {size // layout.ep for size in sizes if size % layout.ep == 0} if layout.ep > 1 else set()
    in_ring = any(getattr(strategy, "ranks_by_sequence_part", False) for strategy in strategies)
    found = layout.rank_classes(sizes, expert_sizes, sequence_parts=in_ring)
    classes = [RankClass(rank=rank, count=count) for rank, count in found]
    # In a ring the ranks between its ends take most: one of them is traced, too.
    if len(classes) <= (2 * TRACED_CLASSES if in_ring else TRACED_CLASSES):
        return classes, ()
    first, last = classes[0], classes[-1]
    counted = next((one for one in classes if _is_inside_ring(layout, one)), first) if in_ring else first
    kept = {one.rank: one.count for one in (first, last)}
    kept[counted.rank] = counted.count
    others = sum(one.count for one in classes if one.rank not in kept)
    kept[counted.rank] += others
    note = (
        f"{others} ranks have shards of sizes between those of rank {first.rank} and rank {last.rank}; they are "
        f"counted as rank {counted.rank}"
        + (", which attends as ranks between the ends of a ring do" if in_ring else ", which has the largest")
    )
    return [RankClass(rank=rank, count=count) for rank, count in sorted(kept.items())], (note,)


def _is_inside_ring(layout: Layout, one: RankClass) -> bool:
    return 0 < layout.coordinates(one.rank)["cp"] < layout.cp - 1


def layout_notes(layout: Layout | None, step: StepSpec, strategies: Sequence[Strategy] = ()) -> tuple[str, ...]:
    """What the report has to say about ranks that work together."""
    if layout is None:
        return ()
    notes = [
        "the other ranks are not run: collectives take the memory of their buffers, and every rank has a full batch"
        + (", tensor-parallel ones the same" if layout.tp > 1 else "")
        + (", context-parallel ones the same, a part of its sequence each" if layout.cp > 1 else "")
    ]
    if step.grad_accum > 1 and engine_of(strategies) is None:
        notes.append(
            "gradients are reduced after every micro-batch"
            if step.sync_each_batch
            else "gradients are reduced after the last micro-batch only and kept whole until then, as the Hugging Face "
            "Trainer does (no_sync); --sync-each-batch reduces them every time"
        )
    return tuple(notes)


@contextlib.contextmanager
def process_group_of(layout: Layout | None, rank: int):
    """Inside, this process is that rank of the layout's world; without a layout nothing changes."""
    if layout is None:
        yield
        return
    from metapeak.tracer.distributed import one_rank_of

    with one_rank_of(layout.world_size, rank):
        yield


def distribution(
    layout: Layout | None, strategies: Sequence[Strategy]
) -> Callable[[torch.nn.Module], torch.nn.Module] | None:
    """What shards the module on its device: every strategy in order, each on what the last returned."""
    if layout is None:
        return None

    def distribute(module):
        if hasattr(module, "each"):  # the stages of a pipeline's rank
            return module.each(distribute)
        for strategy in strategies:
            module = strategy.distribute(module)
        return module

    return distribute


def engine_of(strategies: Sequence[Strategy]) -> MakeEngine | None:
    """What makes the engine that trains in place of the plain loop, None where no strategy brings one."""
    return next((strategy.engine for strategy in strategies if strategy.engine is not None), None)
