"""bitsandbytes' Linear8bitLt (LLM.int8, has_fp16_weights False) with the storages of the real one.

What it changes: a linear layer's weight becomes int8 with one float32 scale a row.
Where each byte comes from: forward casts the input to fp16, looks for outliers above the threshold, quantises the rows
to int8, multiplies into int32 and dequantises into fp16, then casts to the input's dtype. The input itself is kept for
backward, on the autograd context and not as a saved tensor (so no saved-tensor hook sees it). Backward dequantises the
whole weight to the input's dtype.
Not modelled: outlier columns (how many there are depends on the values; each adds a column of the input and of the
weight in 16 bits); weights kept in fp16 (has_fp16_weights True).
Sources: bitsandbytes 0.50 autograd/_functions.py MatMul8bitLt; backends/default/ops.py int8_mixed_scaled_mm,
int8_scaled_mm; backends/cuda/ops.py int8_vectorwise_quant, int8_linear_matmul, int8_mm_dequant.
"""

from __future__ import annotations

import torch
from torch import nn

from metapeak.strategies.quantization import kernels  # noqa: F401  (defines torch.ops.bnb)
from metapeak.strategies.quantization.layer import QuantizedLayer, hold, move_bias


class Int8Params(nn.Parameter):
    """The int8 weight before it is moved to the phantom GPU."""

    has_fp16_weights = False

    def __new__(cls, data, requires_grad=False):
        return torch.Tensor._make_subclass(cls, data, requires_grad)


class MatmulState:
    """What PEFT's Linear8bitLt reads from the layer's state."""

    has_fp16_weights = False

    def __init__(self, threshold: float):
        self.threshold = threshold


class Linear8bitLt(QuantizedLayer, nn.Linear):
    """A Linear8bitLt after its weight was quantised, made from the layer that it replaces (nn.Linear or Conv1D)."""

    weight_storage = ("weight", "SCB")
    index = None

    def __init__(self, source: nn.Module, in_features: int, out_features: int, *, threshold: float = 6.0):
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.state = MatmulState(threshold)
        self.weight = Int8Params(torch.empty((out_features, in_features), dtype=torch.int8, device="meta"))
        move_bias(self, source)
        hold(self, "SCB", (out_features,), torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None and self.bias.dtype != x.dtype:
            self.bias.data = self.bias.data.to(x.dtype)
        return _MatMul8bitLt.apply(x, self.weight, self.bias, self)

    def dequantize(self) -> torch.Tensor:
        # int8_vectorwise_dequant of backends/default/ops.py
        return self.weight.detach() * self.SCB.view(-1, 1) * 7.874015718698502e-3


class _MatMul8bitLt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer: Linear8bitLt):
        input_shape = x.shape
        if x.dim() == 3:
            x = x.reshape(-1, x.shape[-1])
        quantized, row_stats = _quantize_rows(x.to(torch.float16), layer.state.threshold)
        product = torch.ops.bnb.int8_linear_matmul(quantized, weight)
        fused = bias if bias is not None and bias.dtype == torch.float16 else None
        output = torch.ops.bnb.int8_mm_dequant(product, row_stats, layer.SCB, fused)
        if bias is not None and fused is None:
            output.add_(bias)
        output = output.to(x.dtype)
        ctx.layer, ctx.input_shape, ctx.input_dtype = layer, input_shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        if any(ctx.needs_input_grad[:2]):
            ctx.kept_input = x
        shape = (*input_shape[:-1], layer.out_features)
        return output.reshape(shape) if len(input_shape) == 3 else output

    @staticmethod
    def backward(ctx, grad_output):
        layer = ctx.layer
        grad_x = grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(0, dtype=ctx.bias_dtype)
        if grad_output.dim() == 3:
            grad_output = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
        if ctx.needs_input_grad[0]:
            scale = layer.SCB.unsqueeze(1).mul(1.0 / 127.0)
            weight = layer.weight.detach().to(ctx.input_dtype, copy=True).mul_(scale)
            grad_x = torch.matmul(grad_output.to(ctx.input_dtype), weight).view(ctx.input_shape)
        return grad_x, None, grad_bias, None


def _quantize_rows(x: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 rows, their scales). The search for outliers reads its answer on the host: none is taken to be there."""
    rows, row_stats = torch.ops.bnb.int8_vectorwise_quant(x)
    if threshold > 0.0:
        outliers = x.abs() >= threshold
        outliers.any()
    return rows, row_stats
