"""RMSNorm by Unsloth's kernel.

Where each byte comes from: forward allocates its result and one fp32 number a row, and saves its input; backward
overwrites the gradient that it gets, and gives the weight none.
Source: fms-acceleration, plugins/fused-ops-and-kernels, kernels/unsloth/rms_layernorm.py (Fast_RMS_Layernorm).
"""

from __future__ import annotations

import types

import torch

from metapeak.strategies.fused_kernels.operators import kernel


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        rows = x.view(-1, x.shape[-1])
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        scale = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
        kernel.unsloth_rms_norm(out, rows, weight, scale)
        ctx.save_for_backward(rows, weight, scale)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        rows, weight, scale = ctx.saved_tensors
        kernel.unsloth_rms_norm_backward(grad.view(rows.shape), rows, weight, scale)
        return grad, None


def places(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Every RMSNorm of the Llama family."""
    return [part for part in model.modules() if _is_rms_norm(part)]


def use(norm: torch.nn.Module) -> None:
    """Put the kernel into a norm, in place."""
    norm.forward = types.MethodType(_forward, norm)


def _is_rms_norm(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _forward(self, x):
    return _RMSNorm.apply(x, self.weight)
