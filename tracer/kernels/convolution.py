"""Convolutions: what cuDNN takes is its plan's secret, so the assumption is stated with a bound.

Assumed: none. cuDNN's heuristics choose a plan for each shape; torch allocates what the plan asks for and frees it
after the call (aten/src/ATen/native/cudnn/Conv_v8.cpp, run_conv_plan). Plans that need a workspace mostly hold
transposed copies of input, weight and output, because the tensor cores' kernels want channels last: that sum is the
bound which the report prints.
"""

from __future__ import annotations

from metapeak.tracer.kernels.registry import Call, Tensor, workspace

CONVOLUTIONS = ("convolution", "_convolution", "convolution_overrideable", "cudnn_convolution", "convolution_backward")


@workspace(*CONVOLUTIONS)
def convolution(call: Call) -> list[int]:
    return []


def convolution_bound(call: Call) -> int:
    """Bytes of transposed copies of all tensors of a convolution."""
    tensors = [
        tensor for tensor in (*call.args, *call.outputs) if isinstance(tensor, Tensor) and len(tensor.shape) >= 3
    ]
    return sum(tensor.nbytes for tensor in tensors)
