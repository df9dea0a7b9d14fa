"""Checkpointing of a step that is sharded: the real torch.utils.checkpoint, put around modules before the sharding.

What it changes: a policy that would rewrite the recorded step (GradientCheckpointing) becomes the plan of modules that
it stands for: all blocks of the module, else those found on one iteration of the unsharded step. Rewrites know a step's
own operations, not the gathers that a recompute does again.
Where each byte comes from: torch.utils.checkpoint runs in the traced step, inside the units of FSDP, as transformers
(which wraps a layer's forward) and torchtitan (apply_ac before fully_shard) order them. Before 4.52 transformers
checkpointed the call of the layer, which FSDP1 had wrapped: the recompute then runs the unit, and under a frozen base
the hook that reshards it holds the inputs of all blocks and their gradients until backward is over
(torch/distributed/fsdp/_runtime_utils.py, _register_post_backward_reshard_only_hook).
Sources: transformers PreTrainedModel.gradient_checkpointing_enable, modeling_layers.py GradientCheckpointingLayer;
transformers 4.45 modeling_llama.py (LlamaModel.forward); torchtitan models/llama3/parallelize.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from metapeak.strategies.base import Strategy
from metapeak.strategies.checkpoint_policies import Budget, EveryBlock, Policy, Reentrant, policy_plan
from metapeak.strategies.gradient_checkpointing import CheckpointEveryBlock, CheckpointModules, GradientCheckpointing
from metapeak.strategies.parallel.fsdp1 import FSDP1
from metapeak.strategies.parallel.layout import Layout
from metapeak.tracer.errors import InputError


def with_real_checkpoints(
    layout: Layout | None, strategies: Sequence[Strategy], plain_module: Callable, plain_graph: Callable
) -> tuple[Strategy, ...]:
    """The strategies, with checkpoints that are rewrites replaced by real ones where there is a layout.

    `plain_module(strategies)` is the prepared module, `plain_graph(strategies)` records its step on one GPU. Raises
    InputError for a budget, which no such step can weigh.
    """
    around = any(isinstance(strategy, FSDP1) and strategy.checkpoint_around_units for strategy in strategies)
    if around:  # the model's own switch puts them inside
        strategies = [
            GradientCheckpointing(policy=EveryBlock()) if isinstance(strategy, CheckpointEveryBlock) else strategy
            for strategy in strategies
        ]
    rewrites = [strategy for strategy in strategies if isinstance(strategy, GradientCheckpointing)]
    if layout is None or not rewrites:
        return tuple(strategies)
    (rewrite,) = rewrites
    if isinstance(rewrite.policy, Budget):
        raise InputError(
            f"checkpointing {rewrite.policy.name} weighs a step on one GPU, but this one runs on {layout.world_size}. "
            "Name the blocks: checkpointing full, every:N or layers:0-15."
        )
    alone = [strategy for strategy in strategies if strategy.layout is None]
    plan = _plan_of_every_block(rewrite.policy, plain_module, alone) or policy_plan(rewrite.policy, plain_graph(alone))
    if around:  # behind FSDP1, which wraps first
        others = [strategy for strategy in strategies if strategy is not rewrite]
        return (*others, CheckpointModules(plan=plan, around_units=True))
    real = CheckpointModules(plan=plan)
    return tuple(real if strategy is rewrite else strategy for strategy in strategies)


def _plan_of_every_block(policy: Policy, plain_module: Callable, strategies: Sequence[Strategy]) -> dict | None:
    """The plan of a policy that takes all blocks, which needs no trace: a checkpoint around one that never runs does
    nothing. None for other policies, and for a module without blocks.
    """
    reentrant = isinstance(policy, Reentrant)
    if not isinstance(policy.policy if reentrant else policy, EveryBlock):
        return None
    from metapeak.tracer.blocks import block_names  # needs torch

    blocks = block_names(plain_module(strategies))
    return {"checkpointed": blocks, **({"use_reentrant": True} if reentrant else {})} if blocks else None
