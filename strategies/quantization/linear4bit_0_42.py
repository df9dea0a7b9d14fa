"""Linear4bit of bitsandbytes up to 0.42, as Lightning quantises it: the version that litgpt asks for.

What it changes: the weights are packed as in linear4bit.py. Where each byte comes from, beside it: `MatMul4Bit` keeps
its input (`ctx.tensors = (A, B)`), as an attribute that lives as long as the autograd graph, not until backward reads
it; and Lightning casts weights to float16 before it quantises them, so they are dequantised to float16 and then cast to
the dtype of the input: for a moment both are there.
Not modelled: the kernel for a single token, which training does not reach.
Sources: bitsandbytes 0.42 autograd/_functions.py MatMul4Bit; lightning 2.6 fabric/plugins/precision/bitsandbytes.py
_Linear4bit.quantize.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from metapeak.strategies.quantization.linear4bit import Linear4bit


class Linear4bitOf042(Linear4bit):
    """As Linear4bit; the quantised weight was float16."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.quant_dtype = torch.float16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        input_dtype = x.dtype
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        bias = self.bias
        if bias is not None and bias.dtype != x.dtype:
            bias.data = bias.data.to(x.dtype)
        bias = None if bias is None else bias.to(self.compute_dtype)
        return _MatMul4Bit.apply(x, self.weight, bias, self).to(input_dtype)


class _MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer: Linear4bitOf042):
        output = F.linear(x, layer.dequantize().to(x.dtype), bias)
        ctx.layer, ctx.bias_dtype = layer, None if bias is None else bias.dtype
        ctx.input = x if any(ctx.needs_input_grad[:2]) else None
        return output

    @staticmethod
    def backward(ctx, grad_output):
        grad_x = grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(0, dtype=ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            grad_x = torch.matmul(grad_output, ctx.layer.dequantize().to(grad_output.dtype))
        return grad_x, None, grad_bias, None
