"""Checkpointing of a step that is sharded: the real torch.utils.checkpoint, put around modules before the sharding.

What it changes: a policy that would rewrite the recorded step (GradientCheckpointing) becomes the plan of modules that
it stands for, found on one iteration of the unsharded step. Rewrites know a step's own operations, not the gathers that
a recompute does again.
Where each byte comes from: torch.utils.checkpoint runs in the traced step, inside the units of FSDP, as transformers
(which wraps a layer's forward) and torchtitan (apply_ac before fully_shard) order them.
Sources: transformers PreTrainedModel.gradient_checkpointing_enable; torchtitan models/llama3/parallelize.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from metapeak.strategies.base import Strategy
from metapeak.strategies.checkpoint_policies import Budget, policy_plan
from metapeak.strategies.gradient_checkpointing import CheckpointModules, GradientCheckpointing
from metapeak.strategies.parallel.layout import Layout
from metapeak.tracer.errors import InputError


def with_real_checkpoints(
    layout: Layout | None, strategies: Sequence[Strategy], plain_graph: Callable
) -> tuple[Strategy, ...]:
    """The strategies, with checkpoints that are rewrites replaced by real ones where there is a layout.

    `plain_graph(strategies)` records the step on one GPU. Raises InputError for a budget, which no such step can weigh.
    """
    rewrites = [strategy for strategy in strategies if isinstance(strategy, GradientCheckpointing)]
    if layout is None or not rewrites:
        return tuple(strategies)
    (rewrite,) = rewrites
    if isinstance(rewrite.policy, Budget):
        raise InputError(
            f"checkpointing {rewrite.policy.name} weighs a step on one GPU, but this one runs on {layout.world_size}. "
            "Name the blocks: checkpointing full, every:N or layers:0-15."
        )
    graph = plain_graph([strategy for strategy in strategies if strategy.layout is None])
    real = CheckpointModules(plan=policy_plan(rewrite.policy, graph))
    return tuple(real if strategy is rewrite else strategy for strategy in strategies)
