"""GPTQ layers: packed int32 weights and zero points, 16-bit scales and a group index, all of them buffers.

What it changes: a linear layer becomes a QuantLinear as AutoGPTQ and GPTQModel load it.
Where each byte comes from: qweight holds 32 / bits weights in an int32, qzeros the zero points of each group likewise,
scales a float16 for each group and output, g_idx an int32 for each input; the bias is a buffer too.
For FSDP1, whose flat parameters hold floating point alone, fms-acceleration makes qweight and qzeros frozen parameters
that see their bytes as the weights' dtype, and looks at them as integers again in forward (`seen_as`).
Kernels: `triton-v2` (AutoGPTQ, and the copy of it in fms-acceleration) dequantises the whole weight inside an autograd
function, in forward and again in backward. `torch` (what GPTQModel trains with) dequantises with ordinary operators and
multiplies under autograd, so the dequantised weight is saved for backward.
Not modelled: exllama and marlin (inference only); the temporaries inside the dequantisation of `torch`, which GPTQModel
compiles into one kernel; zero points of packing formats other than int32.
Sources: AutoGPTQ nn_modules/qlinear/qlinear_tritonv2.py and triton_utils/dequant.py; GPTQModel nn_modules/qlinear/
torch.py (TorchQuantLinear) and tritonv2.py, which trains as torch; fms-acceleration plugins/accelerated-peft
framework_plugin_autogptq.py (patch_forward_to_view_attributes_before_call).
"""

from __future__ import annotations

import torch
from torch import nn

from metapeak.strategies.quantization import kernels  # noqa: F401  (defines torch.ops.gptq)
from metapeak.strategies.quantization.layer import QuantizedLayer, hold, hold_bias
from metapeak.tracer.errors import InputError


class GptqLinear(QuantizedLayer, nn.Module):
    """A GPTQ layer made from the layer that it replaces (nn.Linear or Conv1D)."""

    weight_storage = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(
        self,
        source: nn.Module,
        in_features: int,
        out_features: int,
        *,
        bits: int = 4,
        group_size: int = 128,
        kernel: str = "torch",
        dtype: torch.dtype = torch.float16,
        seen_as: torch.dtype | None = None,
    ):
        super().__init__()
        if in_features % 32 or out_features % 32:
            raise InputError(
                f"GPTQ packs layers whose sides are multiples of 32; found one of {in_features} inputs and "
                f"{out_features} outputs. Leave it out with --skip-modules."
            )
        self.in_features, self.out_features, self.bits, self.kernel = in_features, out_features, bits, kernel
        self.group_size = group_size if group_size != -1 else in_features
        groups = -(in_features // -self.group_size)
        for name, shape in (
            ("qweight", (in_features // 32 * bits, out_features)),
            ("qzeros", (groups, out_features // 32 * bits)),
        ):
            if seen_as is None:
                hold(self, name, shape, torch.int32)
            else:
                packed = torch.empty(shape, dtype=torch.int32, device="meta").view(seen_as)
                self.register_parameter(name, nn.Parameter(packed, requires_grad=False))
        hold(self, "scales", (groups, out_features), dtype)
        hold(self, "g_idx", (in_features,), torch.int32)
        hold_bias(self, source, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], self.out_features)
        return self._triton(x, shape) if self.kernel == "triton-v2" else self._torch(x, shape)

    def _triton(self, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        out = _QuantLinear.apply(x.reshape(-1, x.shape[-1]), self).half().reshape(shape)
        return out + self.bias if self.bias is not None else out

    def _torch(self, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = x.dtype
        x = x.reshape(-1, x.shape[-1])
        out = torch.matmul(x, self.dequantize().t().to(x.dtype)).reshape(shape)
        if self.bias is not None:
            out.add_(self.bias)
        return out.to(dtype)

    def dequantize(self) -> torch.Tensor:
        return dequantize(self).t()


def dequantize(layer: GptqLinear) -> torch.Tensor:
    """The weight, of shape (in_features, out_features)."""
    qweight, qzeros = (packed.view(torch.int32) for packed in (layer.qweight, layer.qzeros))
    return torch.ops.gptq.dequantize(qweight, layer.scales, qzeros, layer.g_idx, layer.scales.dtype)


class _QuantLinear(torch.autograd.Function):
    """What is saved are the packed tensors, which exist anyway."""

    @staticmethod
    def forward(ctx, x, layer: GptqLinear):
        ctx.layer = layer
        return x @ dequantize(layer)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output @ dequantize(ctx.layer).t(), None
