"""Techniques that change a training step, and `simulate`, which composes them.

from metapeak.strategies import simulate
"""

from metapeak.strategies.base import Strategy
from metapeak.strategies.compose import simulate
from metapeak.strategies.gradient_checkpointing import CheckpointEveryBlock

__all__ = ["CheckpointEveryBlock", "Strategy", "simulate"]
