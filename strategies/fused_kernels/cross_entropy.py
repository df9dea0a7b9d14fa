"""Cross entropy by Unsloth's kernel: no log-probabilities, and the gradient of the logits takes their place.

Where each byte comes from: in forward two fp32 numbers a row (loss, log-sum-exp); above 65,536 words one log-sum-exp
for each 65,536 of them first, and a mask. Backward allocates nothing: the logits become their gradient.
Source: fms-acceleration, plugins/fused-ops-and-kernels, kernels/unsloth/cross_entropy_loss.py (Fast_CrossEntropyLoss,
FastCrossEntropyLoss, FastForCausalLMLoss).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import torch

from metapeak.strategies.losses.kernels import kernel

IGNORED = -100
# Words that one program of the kernel takes; more are split.
MAX_WORDS = 65536


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        rows, words = logits.shape
        parts = -(-words // MAX_WORDS)
        losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
        shape = (rows,) if parts == 1 else (rows, parts)
        logsumexp = torch.empty(shape, dtype=torch.float32, device=logits.device)
        kernel.unsloth_cross_entropy(logits, target, losses, logsumexp)
        if parts > 1:
            logsumexp = torch.logsumexp(logsumexp, dim=1)
            losses += logsumexp
            losses.masked_fill_(target == IGNORED, 0)
        ctx.save_for_backward(logits, logsumexp, target)
        return losses

    @staticmethod
    def backward(ctx, grad_losses):
        logits, logsumexp, target = ctx.saved_tensors
        kernel.unsloth_cross_entropy_backward(logits, target, logsumexp, grad_losses)
        return logits, None


def cross_entropy(logits, target, *args, **kwargs):
    """As torch's function of the same name, for logits (N, V) and targets (N,)."""
    losses = _CrossEntropy.apply(logits, target)
    return losses.sum() / torch.count_nonzero(target != IGNORED)


def use_cross_entropy(model: torch.nn.Module) -> None:
    """Let the loss that a model's forward computes be that of the kernel, in place."""
    inner = model.forward

    def forward(self, *args, **kwargs):
        with _as_cross_entropy():
            return inner(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


@contextlib.contextmanager
def _as_cross_entropy() -> Iterator[None]:
    functional = torch.nn.functional
    before, functional.cross_entropy = functional.cross_entropy, cross_entropy
    try:
        yield
    finally:
        functional.cross_entropy = before
