"""PEFT's prepare_model_for_kbit_training, run for real on the module on meta.

What it changes: every parameter is frozen; for bitsandbytes bases the remaining 16-bit parameters (norms, embeddings,
head, biases) become float32; the embeddings' output requires a gradient, so that reentrant checkpoints work.
Where each byte comes from: the parameters themselves, and float32 activations after them.
`cast_back` is what TRL before 1.0 does afterwards: embeddings and head are bfloat16 again. The norms stay float32, so
what comes out of the first norm is float32, and with it every linear layer's result and the residual stream.
Not modelled: the checkpointing that it switches on (the option `checkpointing` does that).
Sources: PEFT 0.21 utils/other.py prepare_model_for_kbit_training, called here; TRL 0.24 trainer/sft_trainer.py and
trainer/utils.py peft_module_casting_to_bf16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

# Modules that TRL casts to bfloat16 by their names.
_CAST_BACK = ("lm_head", "embed_tokens", "wte", "wpe")


def prepare_for_kbit_training(module: nn.Module) -> None:
    """Run PEFT's k-bit preparation on a quantised module, in place.

    Raises InputError where PEFT is not installed.
    """
    from metapeak.strategies.quantization.peft_door import peft

    peft().prepare_model_for_kbit_training(module, use_gradient_checkpointing=False, auto_clear_cache=False)
    if hasattr(module, "enable_input_require_grads"):
        module.enable_input_require_grads()


def cast_back(module: nn.Module) -> None:
    """Give embeddings and head that are float32 now bfloat16 weights, by TRL's list of names, in place."""
    import torch

    for name, part in module.named_modules():
        if any(known in name for known in _CAST_BACK) and "norm" not in name:
            weight = getattr(part, "weight", None)
            if weight is not None and weight.dtype == torch.float32:
                part.to(torch.bfloat16)
