"""Normalization layers, softmax and losses: partial sums of gradients, statistics, copies of strided inputs.

Rows M, features N of a layer norm; batch B, channels C, groups G of a group norm.
"""

from __future__ import annotations

import math

from metapeak.tracer.kernels.reductions import reduction_workspace
from metapeak.tracer.kernels.registry import Call, Tensor, itemsize, workspace

_PARALLEL_ROWS = 64 * 1024
_WARP, _ROWS_A_BLOCK, _MAX_GRID = 32, 32, 32 * 1024


@workspace("native_layer_norm", "_fused_rms_norm")
def layer_norm(call: Call) -> list[int]:
    """A dense copy of a strided input. Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu, layer_norm_cuda."""
    return [call.args[0].contiguous_copy_bytes]


@workspace("native_layer_norm_backward")
def layer_norm_backward(call: Call) -> list[int]:
    grad, tensor, normalized = call.args[:3]
    wants = call.arg(7, "output_mask", (True, True, True))
    return [
        grad.contiguous_copy_bytes,
        tensor.contiguous_copy_bytes,
        *weight_gradient_workspace(call, tensor, normalized, int(bool(wants[1])) + int(bool(wants[2]))),
    ]


@workspace("_fused_rms_norm_backward")
def rms_norm_backward(call: Call) -> list[int]:
    grad, tensor, normalized = call.args[:3]
    wants = call.arg(5, "output_mask", (True, True))
    return [
        grad.contiguous_copy_bytes,
        tensor.contiguous_copy_bytes,
        *weight_gradient_workspace(call, tensor, normalized, int(bool(wants[1]))),
    ]


def weight_gradient_workspace(call: Call, tensor: Tensor, normalized, gradients: int) -> list[int]:
    """Partial sums of the gradients of weight and bias, where rows are many and features few: one row of partial sums
    for each 32 rows, at most 32,768 blocks of the grid; then each is summed into a new gradient. Else none.

    Source: layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: M > 65,536 and N / 32 < multiprocessors / 2.
    """
    features = math.prod(normalized)
    rows = tensor.numel // max(features, 1)
    if rows <= _PARALLEL_ROWS or features // _WARP >= call.device.multiprocessors // 2 or not gradients:
        return []
    blocks = min(_MAX_GRID // -(-features // _WARP), -(-rows // _ROWS_A_BLOCK))
    partial = Tensor((blocks, features), (features, 1), tensor.dtype)
    staging = reduction_workspace(partial, [0], call.device, max(4, tensor.itemsize))
    return [partial.nbytes] * gradients + [features * tensor.itemsize] * gradients + staging


@workspace("native_group_norm")
def group_norm(call: Call) -> list[int]:
    """Scale and shift of every channel of every sample. Source: group_norm_kernel.cu, GroupNormKernelImplInternal."""
    tensor, weight, bias = call.args[:3]
    batch, channels, spatial = call.args[3:6]
    dense = tensor.contiguous_copy_bytes
    if spatial == 1 or (weight is None and bias is None):
        return [dense]
    return [dense, *[batch * channels * max(4, itemsize(tensor.dtype))] * 2]


@workspace("native_group_norm_backward")
def group_norm_backward(call: Call) -> list[int]:
    """Sums over positions of every channel (ds, db), and the factors c1 [B, C], c2 and c3 [B, G], in float32.

    Source: group_norm_kernel.cu, GroupNormBackwardKernelImplInternal.
    """
    tensor = call.args[1]
    batch, channels, _, groups = call.args[5:9]
    element = max(4, itemsize(tensor.dtype))
    return [*[batch * channels * element] * 3, *[batch * groups * element] * 2]


@workspace("_softmax", "_log_softmax", "softmax", "log_softmax")
def softmax(call: Call) -> list[int]:
    """A dense copy of a strided input. Source: aten/src/ATen/native/cuda/SoftMax.cu, host_softmax."""
    return [call.args[0].contiguous_copy_bytes]


@workspace("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(call: Call) -> list[int]:
    """Dense copies of strided inputs. Source: SoftMax.cu, host_softmax_backward."""
    return [tensor.contiguous_copy_bytes for tensor in call.args[:2]]


@workspace("_ctc_loss_backward")
def ctc_loss_backward(call: Call) -> list[int]:
    """log_beta, as large as log_alpha [B, time, 2 * longest target + 1].

    Source: aten/src/ATen/native/cuda/LossCTC.cu, ctc_loss_backward_gpu_template.
    """
    alphas = [tensor for tensor in call.args if isinstance(tensor, Tensor) and len(tensor.shape) == 3]
    return [alphas[-1].nbytes] if alphas else []
