"""torchtitan: `torchtitan:llama3:8B` and its like, the Transformer of torchtitan 0.1 with its trainer's step.

Where each byte comes from: torchtitan's own classes run in the trace; cross entropy on a float32 copy of the logits,
which the trainer deletes before backward. The class of 0.1 (2025) is that of the published tables of December 2024:
separate q, k and v projections, complex rotary embeddings, repeated keys and values, torch's rms_norm. Later releases
fuse the projections and have no scaled_dot_product_attention for language models, so they are not used.
Not modelled: masks of packed documents (a batch is one causal sequence a row), float8, torch.compile.
Sources: torchtitan 0.1.0 models/llama3/model/{model,args}.py, components/loss.py, train.py (train_step: `del pred`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from metapeak.tracer.packages.base import Inputs, LossFunction, Package, tokens

if TYPE_CHECKING:
    import torch
    from torch import nn

    from metapeak.tracer.spec import BatchSpec

VOCABULARY = 128_256  # of Llama 3's tokenizer, which the trainer loads
FAMILY = "llama3:"
MAX_SEQ_LEN = 131_072


class Torchtitan(Package):
    prefix = "torchtitan"
    modules = ("torchtitan.models.llama3", "torchtitan.components.loss")
    default_dtype = "float32"
    autocast_region = "forward"

    def names(self) -> list[str]:
        from torchtitan.models.llama3 import llama3_configs

        return [FAMILY + flavor for flavor, args in llama3_configs.items() if not args.use_flex_attn]

    def build(self, name: str, dtype: torch.dtype) -> nn.Module:
        return _build(name.removeprefix(FAMILY), MAX_SEQ_LEN).to(dtype)

    def batch(self, module: nn.Module, spec: BatchSpec) -> Inputs:
        ids, notes = tokens(spec, VOCABULARY, MAX_SEQ_LEN, "this torchtitan model")
        return Inputs(tensors={"tokens": ids, "labels": ids.clone()}, notes=notes)

    def prepare_for(self, module: nn.Module, batch: BatchSpec) -> None:
        """The trainer builds the table of positions for its own sequence length."""
        import torch

        module.model_args = dataclasses.replace(
            module.model_args, max_seq_len=batch.seq_len or min(batch.default_seq_len, MAX_SEQ_LEN)
        )
        with torch.device("meta"):
            module.freqs_cis = module._precompute_freqs_cis()

    def loss(self, name: str) -> LossFunction:
        return training_loss

    def notes(self, module: nn.Module) -> tuple[str, ...]:
        return ("torchtitan's trainer deletes the logits before backward; cross entropy is on their float32 copy",)


def _build(flavor: str, max_seq_len: int) -> nn.Module:
    import torch
    from torchtitan.models.llama3 import Transformer, llama3_configs

    args = dataclasses.replace(llama3_configs[flavor], vocab_size=VOCABULARY, max_seq_len=max_seq_len)
    with torch.device("meta"):
        return Transformer(args)


def training_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    from torchtitan.components.loss import cross_entropy_loss

    return cross_entropy_loss(model(batch["tokens"]), batch["labels"])


PACKAGE = Torchtitan()
