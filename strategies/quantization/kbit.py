"""PEFT's prepare_model_for_kbit_training, run for real on the module on meta.

What it changes: every parameter is frozen; for bitsandbytes bases the remaining 16-bit parameters (norms, embeddings,
head, biases) become float32; the embeddings' output requires a gradient, so that reentrant checkpoints work.
Where each byte comes from: the parameters themselves, and float32 activations after them.
Not modelled: the checkpointing that it switches on (the option `checkpointing` does that).
Source: PEFT 0.21 utils/other.py prepare_model_for_kbit_training, called here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def prepare_for_kbit_training(module: nn.Module) -> None:
    """Run PEFT's k-bit preparation on a quantised module, in place.

    Raises InputError where PEFT is not installed.
    """
    from metapeak.strategies.quantization.peft_door import peft

    peft().prepare_model_for_kbit_training(module, use_gradient_checkpointing=False, auto_clear_cache=False)
    if hasattr(module, "enable_input_require_grads"):
        module.enable_input_require_grads()
