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

    Stages of a pipeline differ, and sharding by parameters (`shards_dim_0`) makes ranks differ: its last ones have less
    of a dimension that the degree does not divide. The first of a stage's ranks never has less than another one.
    """
    if layout is None:
        return [RankClass(rank=0, count=1)], ()
    if layout.pp > 1:  # every stage's ranks are of their own, `stage` apart
        inner, notes = distinct_ranks(replace(layout, pp=1), module, strategies)
        stage = layout.world_size // layout.pp
        ranks = [replace(one, rank=one.rank + place * stage) for place in range(layout.pp) for one in inner]
        return ranks, notes
    if not any(getattr(strategy, "shards_dim_0", False) for strategy in strategies):
        return [RankClass(rank=0, count=layout.world_size)], ()
    sizes = {parameter.shape[0] for parameter in module.parameters() if parameter.dim()}
    classes = [RankClass(rank=rank, count=count) for rank, count in layout.rank_classes(sizes)]
    if len(classes) <= TRACED_CLASSES:
        return classes, ()
    first, between, last = classes[0], classes[1:-1], classes[-1]
    others = sum(other.count for other in between)
    note = (
        f"{others} ranks have shards of sizes between those of rank {first.rank} and rank {last.rank}; they are "
        f"counted as rank {first.rank}, which has the largest"
    )
    return [RankClass(rank=first.rank, count=first.count + others), last], (note,)


def layout_notes(layout: Layout | None, step: StepSpec) -> tuple[str, ...]:
    """What the report has to say about ranks that work together."""
    if layout is None:
        return ()
    notes = [
        "the other ranks are not run: collectives take the memory of their buffers, and every rank has a full batch"
        + (", tensor-parallel ones the same" if layout.tp > 1 else "")
    ]
    if step.grad_accum > 1:
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
