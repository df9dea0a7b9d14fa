"""AWQ layers (GEMM packing): packed int32 weights and zero points and 16-bit scales, all of them buffers.

What it changes: a linear layer becomes a WQLinear_GEMM as AutoAWQ and GPTQModel load it.
Where each byte comes from: qweight holds 32 / bits outputs in an int32 for each input, qzeros the zero points of each
group likewise, scales a 16-bit number for each group and output. Training dequantises the whole weight in an autograd
function, in forward and again in backward, and backward repeats the dequantised weight once for each sample of the
batch. The input is saved although its gradient does not need it.
Not modelled: GEMV and Marlin packing (inference only); the fused kernel for at most 1,024 tokens.
Sources: AutoAWQ modules/linear/gemm.py WQLinearMMFunction; GPTQModel nn_modules/qlinear/gemm_awq.py AwqGemmFn.
"""

from __future__ import annotations

import torch
from torch import nn

from metapeak.strategies.quantization import kernels  # noqa: F401  (defines torch.ops.awq)
from metapeak.strategies.quantization.layer import QuantizedLayer, hold, hold_bias
from metapeak.tracer.errors import InputError


class AwqLinear(QuantizedLayer, nn.Module):
    """An AWQ layer made from the layer that it replaces."""

    weight_storage = ("qweight", "qzeros", "scales")

    def __init__(self, source: nn.Module, in_features: int, out_features: int, *, bits: int = 4, group_size: int = 128):
        super().__init__()
        self.in_features, self.out_features, self.bits = in_features, out_features, bits
        self.group_size = group_size if group_size != -1 else in_features
        if in_features % self.group_size or out_features % (32 // bits):
            raise InputError(
                f"AWQ packs layers whose inputs are a multiple of the group size ({self.group_size}) and whose outputs "
                f"are one of {32 // bits}; found one of {in_features} inputs and {out_features} outputs. Leave it out "
                "with --skip-modules."
            )
        groups, packed = in_features // self.group_size, out_features // (32 // bits)
        # GPTQModel casts scales and bias to the dtype of the first input; either has 16 bits.
        dtype = source.weight.dtype if source.weight.dtype == torch.bfloat16 else torch.float16
        hold(self, "qweight", (in_features, packed), torch.int32)
        hold(self, "qzeros", (groups, packed), torch.int32)
        hold(self, "scales", (groups, out_features), dtype)
        hold_bias(self, source, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        if dtype not in (torch.float16, torch.bfloat16):
            x = x.to(torch.float16)
        return _AwqMatMul.apply(x, self).to(dtype)

    def dequantize(self) -> torch.Tensor:
        return torch.ops.awq.dequantize(self.qweight, self.scales, self.qzeros).t()


class _AwqMatMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer: AwqLinear):
        ctx.save_for_backward(x)
        ctx.layer = layer
        weight = torch.ops.awq.dequantize(layer.qweight, layer.scales, layer.qzeros)
        out = torch.matmul(x, weight.to(x.dtype))
        return out + layer.bias.to(out.dtype) if layer.bias is not None else out

    @staticmethod
    def backward(ctx, grad_output):
        layer = ctx.layer
        weight = torch.ops.awq.dequantize(layer.qweight, layer.scales, layer.qzeros).to(grad_output.dtype)
        batch_size = grad_output.shape[0]
        return grad_output.bmm(weight.transpose(0, 1).unsqueeze(0).repeat(batch_size, 1, 1)), None
