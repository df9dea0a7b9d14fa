"""Programs of a few lines whose memory somebody published, built as their source describes them.

`synthetic:lm-head-loss`: the hidden states of a language model, its head of 4,096 x 151,936 and the loss, forward and
backward, no optimizer. Where each byte comes from: torch's own operators. `eager` is cross entropy on the logits
without a cast, which the script's variable holds; `chunked:32` computes logits, loss and both gradients of one chunk of
tokens after the other inside forward (ChunkLoss), on float32 logits. The loop's variables hold the gradients and the
logits of a chunk until those of the next one take their names.
Sources: InternLM/xtuner docs/en/pretrain_sft/advanced_tutorial/loss.md; xtuner/v1/loss/chunk_loss.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from metapeak.tracer.packages.base import Inputs, LossFunction, Package

if TYPE_CHECKING:
    import torch
    from torch import nn

    from metapeak.tracer.spec import BatchSpec

HIDDEN, VOCABULARY, TOKENS, CHUNKS = 4096, 151_936, 32_768, 32
NAME = "lm-head-loss"


class Synthetic(Package):
    prefix = "synthetic"
    modules = ("torch",)
    task = "lm-head-loss"
    default_dtype = "bfloat16"
    losses = ("eager", f"chunked:{CHUNKS}")

    def names(self) -> list[str]:
        return [NAME]

    def build(self, name: str, dtype: torch.dtype) -> nn.Module:
        import torch

        with torch.device("meta"):
            return torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=dtype)

    def prepare_for(self, module: nn.Module, batch: BatchSpec) -> None:
        """The hidden states require a gradient and are there before anything runs, as parameters are."""
        import torch

        shape = (batch.batch_size, batch.seq_len or TOKENS, HIDDEN)
        module.hidden = torch.nn.Parameter(torch.empty(shape, dtype=module.weight.dtype, device="meta"))

    def batch(self, module: nn.Module, spec: BatchSpec) -> Inputs:
        import torch

        return Inputs(tensors={"labels": torch.zeros(spec.batch_size, spec.seq_len or TOKENS, dtype=torch.int64)})

    def loss(self, name: str) -> LossFunction:
        return eager_loss if name == "eager" else chunked_loss

    def notes(self, module: nn.Module) -> tuple[str, ...]:
        return ("hidden states and head are counted as parameters; there is no optimizer",)


def eager_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    import torch

    model.logits = model(model.hidden)  # a variable of the script: held through backward
    return torch.nn.functional.cross_entropy(model.logits.flatten(0, 1), batch["labels"].flatten())


def chunked_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    import torch

    # The script's first half ran before: its `loss` still leads to the hidden states of then and their gradient.
    model.first_half = [torch.empty_like(model.hidden) for _ in range(2)]
    return _chunk_loss()(model.hidden, model.weight, batch["labels"])


def _chunk_loss():
    import torch
    from torch.nn import functional

    def loss_of(hidden, weight, labels):
        logits = functional.linear(hidden, weight).float()
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.sum(), logits

    class ChunkLoss(torch.autograd.Function):
        """Order and lifetimes of xtuner's ChunkLoss.forward: its names hold loss, logits and gradients of a chunk."""

        @staticmethod
        def forward(ctx, hidden, weight, labels):
            total = torch.zeros((), device=hidden.device)
            grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
            size = -(-hidden.shape[1] // CHUNKS)
            parts = zip(*(tensor.split(size, dim=1) for tensor in (hidden, grad_hidden, labels)))
            for chunk, grad_chunk, labels_chunk in parts:
                with torch.enable_grad():
                    chunk.requires_grad_()
                    loss, _held = loss_of(chunk, weight, labels_chunk)
                    chunk_grad, chunk_weight_grad = torch.autograd.grad(loss, (chunk, weight))
                total.add_(loss)
                grad_chunk.copy_(chunk_grad)
                grad_weight.add_(chunk_weight_grad)
            ctx.save_for_backward(grad_hidden, grad_weight)
            return total

        @staticmethod
        def backward(ctx, grad):
            grad_hidden, grad_weight = ctx.saved_tensors
            return grad_hidden, grad_weight, None

    return ChunkLoss.apply


PACKAGE = Synthetic()
