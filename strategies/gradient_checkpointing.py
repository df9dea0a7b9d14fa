"""Gradient checkpointing: blocks keep their input and run again in backward.

What it changes: `torch.utils.checkpoint` (non-reentrant) around every block, switched on the way transformers does.
Where each byte comes from: the traced step runs the real checkpoint code, recompute included.
Not modelled: other policies than every block; offload.
Sources: transformers PreTrainedModel.gradient_checkpointing_enable; torch/utils/checkpoint.py.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metapeak.strategies.base import NoOpStrategy
from metapeak.tracer.errors import InputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class CheckpointEveryBlock(NoOpStrategy):
    """Every block that the model's own `gradient_checkpointing_enable` covers."""

    name = "checkpointing"
    use_reentrant: bool = False

    def prepare(self, module: torch.nn.Module) -> None:
        if not getattr(module, "supports_gradient_checkpointing", False):
            raise InputError(
                f"{type(module).__name__} supports no gradient checkpointing, so 'checkpointing full' has no blocks to "
                "cover. Use 'checkpointing none'."
            )
        with warnings.catch_warnings():  # the name changes in transformers 6; this one works in all of 5
            warnings.simplefilter("ignore", FutureWarning)
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": self.use_reentrant})


# The values of the option `checkpointing`.
POLICIES = {"none": None, "full": CheckpointEveryBlock()}
