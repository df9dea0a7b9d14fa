"""Techniques that change a training step, and `simulate`, which composes them.

from metapeak.strategies import simulate
"""

from metapeak.strategies.base import Strategy
from metapeak.strategies.checkpoint_policies import parse_policy
from metapeak.strategies.compose import simulate
from metapeak.strategies.frozen_base import FrozenBase
from metapeak.strategies.gradient_checkpointing import (
    CheckpointEveryBlock,
    CheckpointModules,
    GradientCheckpointing,
    apply_checkpoint_plan,
)
from metapeak.strategies.lora import LoRA
from metapeak.strategies.request import simulate_options

__all__ = [
    "CheckpointEveryBlock",
    "CheckpointModules",
    "FrozenBase",
    "GradientCheckpointing",
    "LoRA",
    "Strategy",
    "apply_checkpoint_plan",
    "parse_policy",
    "simulate",
    "simulate_options",
]
