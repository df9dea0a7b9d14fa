"""bitsandbytes' Linear4bit (nf4, fp4) with the storages of the real one and nothing in them.

What it changes: a linear layer's weight becomes a packed tensor and its statistics; forward and backward dequantise.
Where each byte comes from: quantize_4bit makes one byte for two weights and a float32 absmax for 64; with double
quantisation the absmax is a byte, its own absmax a float32 for 256 of them, and there are an offset and a code table of
256. The code table of 16 is a tensor of each layer. `MatMul4Bit` dequantises the whole weight in forward and again in
backward, saves no activation and returns no gradient of the weight.
Not modelled: the fused kernel that bitsandbytes >= 0.49 may run for up to 1,536 rows (it dequantises nothing in
forward; backward is the same).
Sources: bitsandbytes 0.50 nn/modules.py Linear4bit.forward; autograd/_functions.py MatMul4Bit; functional.py
quantize_4bit, dequantize_4bit; backends/cuda/ops.py _dequant_linear_fallback.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from metapeak.strategies.quantization import kernels  # noqa: F401  (defines torch.ops.bnb)
from metapeak.strategies.quantization.layer import QuantizedLayer, hold, move_bias

BLOCK_SIZE = 64
NESTED_BLOCK_SIZE = 256
NESTED_CODE_NUMEL = 256
CODE_NUMEL = 16


class Params4bit(nn.Parameter):
    """The packed weight before it is moved to the phantom GPU, with what PEFT reads from the real Params4bit."""

    def __new__(cls, data, requires_grad=False, *, quant_type="nf4", compress_statistics=True):
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.quant_type = quant_type
        self.compress_statistics = compress_statistics
        return self


class Linear4bit(QuantizedLayer, nn.Linear):
    """A Linear4bit after its weight was quantised, made from the layer that it replaces (nn.Linear or Conv1D)."""

    weight_storage = ("weight", "absmax", "code", "offset", "nested_absmax", "nested_code")

    def __init__(
        self,
        source: nn.Module,
        in_features: int,
        out_features: int,
        *,
        quant_type: str = "nf4",
        compress_statistics: bool = True,
        compute_dtype: torch.dtype | None = None,
        quant_storage: torch.dtype = torch.uint8,
    ):
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.quant_type, self.compress_statistics = quant_type, compress_statistics
        self.compute_dtype = compute_dtype
        self.quant_dtype = source.weight.dtype  # what quant_state.dtype is: backward dequantises to it
        numel = self.weight_numel
        packed = torch.empty(((numel + 1) // (2 * quant_storage.itemsize), 1), dtype=quant_storage, device="meta")
        self.weight = Params4bit(packed, quant_type=quant_type, compress_statistics=compress_statistics)
        move_bias(self, source)
        num_blocks = -(numel // -BLOCK_SIZE)
        hold(self, "absmax", (num_blocks,), torch.uint8 if compress_statistics else torch.float32)
        hold(self, "code", (CODE_NUMEL,), torch.float32)
        for name in ("offset", "nested_absmax", "nested_code"):
            self.register_buffer(name, None)
        if compress_statistics:
            hold(self, "offset", (), torch.float32)
            hold(self, "nested_absmax", (-(num_blocks // -NESTED_BLOCK_SIZE),), torch.float32)
            hold(self, "nested_code", (NESTED_CODE_NUMEL,), torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        input_dtype = x.dtype
        if self.compute_dtype is None and input_dtype in (torch.float32, torch.bfloat16):
            self.compute_dtype = input_dtype  # the first input decides, as in set_compute_type
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        bias = self.bias
        if bias is not None:
            if bias.dtype != x.dtype:
                bias.data = bias.data.to(x.dtype)
            bias = bias.to(self.compute_dtype)
        return _MatMul4Bit.apply(x, self.weight, bias, self).to(input_dtype)

    def dequantize(self) -> torch.Tensor:
        absmax = self.absmax
        if self.compress_statistics:
            absmax = torch.ops.bnb.dequantize_blockwise(absmax, self.nested_absmax, self.nested_code, torch.float32)
            absmax += self.offset
        shape = [self.out_features, self.in_features]
        return torch.ops.bnb.dequantize_4bit(self.weight.detach(), absmax, shape, self.quant_dtype)

    def dequantize_for_forward(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in the dtype of the input, as the unfused forward of gemm_4bit computes it."""
        absmax = self.absmax
        if self.compress_statistics:
            unscaled = torch.ops.bnb.dequantize_blockwise(absmax, self.nested_absmax, self.nested_code, torch.float32)
            absmax = unscaled + self.offset
        return torch.ops.bnb.dequantize_4bit(self.weight, absmax, [self.out_features, self.in_features], dtype)


class _MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer: Linear4bit):
        ctx.layer, ctx.bias_dtype = layer, None if bias is None else bias.dtype
        return F.linear(x, layer.dequantize_for_forward(x.dtype), bias)

    @staticmethod
    def backward(ctx, grad_output):
        grad_x = grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(0, dtype=ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            grad_x = torch.matmul(grad_output, ctx.layer.dequantize().to(grad_output.dtype))
        return grad_x, None, grad_bias, None
