"""Rotary embeddings by Unsloth's kernel: queries and keys are rotated where they lie.

Where each byte comes from: nothing is allocated, in forward or backward, but a contiguous gradient where the one that
comes in is none. The tables of cosines and sines are held until backward.
Source: fms-acceleration, plugins/fused-ops-and-kernels, kernels/unsloth/rope_embedding.py (Fast_RoPE_Embedding).
"""

from __future__ import annotations

import sys
import types

import torch

from metapeak.strategies.fused_kernels.operators import kernel

_NAME = "apply_rotary_pos_emb"


class _RoPE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        batch, length, heads, size = x.shape
        rows = x.view(batch * length, heads * size)
        kernel.unsloth_rope(rows, cos, sin)
        ctx.cos, ctx.sin = cos, sin
        return rows.view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        batch, length, heads, size = grad.shape
        rows = grad.reshape(batch * length, heads * size)
        kernel.unsloth_rope(rows, ctx.cos, ctx.sin)
        return rows.view(grad.shape), None, None


def apply_rotary_pos_emb(q, k, cos, sin, *args, **kwargs):
    """As transformers' function of the same name: q and k (B, heads, S, head size)."""
    return tuple(_RoPE.apply(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))


def places(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Every attention whose file has transformers' function."""
    return [part for part in model.modules() if _is_attention(part)]


def use(attention: torch.nn.Module) -> None:
    """Put the kernel into an attention, in place."""
    attention.forward = types.MethodType(_with_rope(attention.forward), attention)


def _is_attention(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("Attention") and hasattr(_file(module), _NAME)


def _file(module: torch.nn.Module) -> types.ModuleType:
    return sys.modules[type(module).__module__]


def _with_rope(inner):
    def forward(self, *args, **kwargs):
        file = _file(self)  # around each call: a recomputed block finds the function too
        before = getattr(file, _NAME)
        setattr(file, _NAME, apply_rotary_pos_emb)
        try:
            return inner(*args, **kwargs)
        finally:
            setattr(file, _NAME, before)

    return forward
