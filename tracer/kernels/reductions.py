"""Reductions: the staging buffer in which blocks of one output meet, and the casts and temporaries around it.

Source: aten/src/ATen/native/cuda/Reduce.cuh (setReduceConfig, ReduceConfig, gpu_reduce_kernel), aten/src/ATen/native/
ReduceOps.cpp and ReduceOpsUtils.h (make_reduction's cast), TensorIterator.cpp (order and joining of dimensions).
Checked against recorded allocator histories: tests/tracer/test_kernels.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from metapeak.tracer.kernels.registry import Call, Device, Tensor, itemsize, workspace

_WARP = 32
_MAX_THREADS = 512
_MIN_VALUES_PER_THREAD, _MAX_VALUES_PER_THREAD = 16, 256
_INT32_MAX = (1 << 31) - 1
_LOW_PRECISION = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class _Axis:
    """Joined dimensions: extent, and strides in elements of input and output (0 for a reduced one)."""

    extent: int
    input: int
    output: int


def reduction_workspace(tensor: Tensor, dims: Sequence[int], device: Device, accumulator_bytes: int) -> list[int]:
    """Blocks that reducing `tensor` over `dims` takes: the staging buffer and its semaphores, or none.

    `accumulator_bytes` is the size of what a thread accumulates: 4 for float32 and everything smaller.

    >>> bf16 = Tensor((4096, 1024), (1024, 1), "float32")
    >>> reduction_workspace(bf16, [0], Device(multiprocessors=108), 4)  # recorded: 33,554,432 and 32 bytes
    [33554432, 32]
    """
    if not tensor.numel:
        return []
    axes = _axes(tensor, dims)
    while not _fits_32_bits(axes, tensor.itemsize):  # halved as TensorIterator::with_32bit_indexing does
        largest = max(range(len(axes)), key=lambda at: (axes[at].extent - 1) * max(axes[at].input, axes[at].output))
        axes[largest] = _Axis(-(-axes[largest].extent // 2), axes[largest].input, axes[largest].output)
    return _staging(axes, tensor.itemsize, device, accumulator_bytes)


def _axes(tensor: Tensor, dims: Sequence[int]) -> list[_Axis]:
    """Reduced dimensions first, each group by stride, neighbours joined where both strides allow."""
    reduced = {dim % len(tensor.shape) for dim in dims} if tensor.shape else set()
    output_stride, stride = {}, 1
    for axis in reversed(range(len(tensor.shape))):
        output_stride[axis] = 0 if axis in reduced else stride
        stride *= 1 if axis in reduced else tensor.shape[axis]
    axes = [
        _Axis(tensor.shape[axis], tensor.stride[axis], output_stride[axis])
        for axis in range(len(tensor.shape))
        if tensor.shape[axis] != 1
    ]
    axes.sort(key=lambda axis: (axis.output != 0, axis.output, axis.input))
    joined: list[_Axis] = []
    for axis in axes:
        last = joined[-1] if joined else None
        if last and axis.input == last.extent * last.input and axis.output == last.extent * last.output:
            joined[-1] = _Axis(last.extent * axis.extent, last.input, last.output)
        else:
            joined.append(axis)
    return joined


def _fits_32_bits(axes: list[_Axis], element_bytes: int) -> bool:
    if math.prod(axis.extent for axis in axes) > _INT32_MAX:
        return False
    return 1 + sum((axis.extent - 1) * axis.input * element_bytes for axis in axes) <= _INT32_MAX


def _staging(axes: list[_Axis], element_bytes: int, device: Device, accumulator_bytes: int) -> list[int]:
    reduced = [axis for axis in axes if axis.output == 0]
    kept = [axis for axis in axes if axis.output]
    inputs = math.prod(axis.extent for axis in reduced)
    outputs = math.prod(axis.extent for axis in kept)
    # Along which dimension the fastest stride runs decides what the threads of a warp share.
    along_input = not kept or not axes or (bool(reduced) and reduced[0].input < kept[0].input)
    output_vector = 1
    if along_input:
        dim0, dim1 = inputs, outputs
        if axes and reduced[0].input == 1 and dim0 >= 128 and len(reduced) == 1:
            dim0 //= 4
    else:
        dim0, dim1 = outputs, inputs
        if kept[0].input == 1:
            output_vector = _output_vector(kept, reduced)
            dim0 //= output_vector
    width, height = _block(dim0, dim1, output_vector)
    step_input, step_output = (width, 1) if along_input else (1, width)
    split_over_warps = -(-inputs // step_input) >= min(height * 16, _MAX_VALUES_PER_THREAD)
    if split_over_warps:
        step_input *= height
    else:
        step_output *= height
    grid = -(-(outputs // output_vector) // step_output)
    values = -(-inputs // step_input)
    target = device.multiprocessors * (device.threads_per_multiprocessor // (width * height))
    if not split_over_warps or values < _MAX_VALUES_PER_THREAD or grid > target:
        return []
    most, fewest = -(-values // _MIN_VALUES_PER_THREAD), -(-values // _MAX_VALUES_PER_THREAD)
    blocks_an_output = max(min(-(-target // grid), most), fewest)
    if blocks_an_output <= 1:
        return []
    staging = accumulator_bytes * outputs * blocks_an_output
    if not along_input:
        staging *= width * output_vector
    return [staging, 4 * grid]


def _output_vector(kept: list[_Axis], reduced: list[_Axis]) -> int:
    """Outputs that a thread loads at once: what divides the fastest extent and every other stride."""
    size = 4
    for number in (kept[0].extent, *(axis.input for axis in kept[1:]), *(axis.input for axis in reduced)):
        while number % size:
            size //= 2
    return size


def _block(dim0: int, dim1: int, output_vector: int) -> tuple[int, int]:
    most = _MAX_THREADS // output_vector
    wide, high = (min(_power_of_two_below(dim), most) for dim in (dim0, dim1))
    height = min(high, most // min(wide, _WARP))
    return min(wide, most // height), height


def _power_of_two_below(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


# -- operators ---------------------------------------------------------------------------------------------------------


def _dims(call: Call, position: int, tensor: Tensor) -> list[int]:
    dims = call.arg(position, "dim")
    if isinstance(dims, int):
        dims = [dims]
    return list(dims) if dims else list(range(len(tensor.shape)))


def _cast_bytes(tensor: Tensor, output: Tensor) -> int:
    """The input in the dtype of the output, unless the kernel casts on the fly (half precision to float32)."""
    if tensor.dtype == output.dtype or (tensor.dtype in _LOW_PRECISION and output.dtype == "float32"):
        return 0
    return tensor.numel * output.itemsize


def _summing(call: Call, dims: list[int]) -> list[int]:
    tensor, output = call.args[0], call.outputs[0]
    cast = _cast_bytes(tensor, output)
    if cast:
        tensor = Tensor(tensor.shape, tensor.stride, output.dtype)
    accumulator = max(4, output.itemsize)
    return [*([cast] if cast else []), *reduction_workspace(tensor, dims, call.device, accumulator)]


@workspace("sum", "mean", "prod", "nansum")
def sum_or_mean(call: Call) -> list[int]:
    """Source: ReduceSumProdKernel.cu, ReduceMomentKernel.cu; half precision accumulates in float32."""
    tensor = call.args[0]
    if call.overload in ("default", "dim_int") and call.arg(1, "dim") is None:
        return _summing(call, list(range(len(tensor.shape))))
    return _summing(call, _dims(call, 1, tensor))


@workspace("linalg_vector_norm")
def vector_norm(call: Call) -> list[int]:
    """Source: ReduceNormKernel.cu."""
    return _summing(call, _dims(call, 2, call.args[0]))


@workspace("norm")
def norm(call: Call) -> list[int]:
    position = 2
    return _summing(call, _dims(call, position, call.args[0]))


@workspace("amax", "amin", "any", "all", "count_nonzero")
def extreme(call: Call) -> list[int]:
    """Source: ReduceMaxValuesKernel.cu, ReduceMinValuesKernel.cu, ReduceLogicKernel.cu."""
    tensor, output = call.args[0], call.outputs[0]
    accumulator = 1 if output.dtype == "bool" else max(4, output.itemsize)
    return reduction_workspace(tensor, _dims(call, 1, tensor), call.device, accumulator)


@workspace("max", "min", "argmax", "argmin", "aminmax")
def extreme_with_index(call: Call) -> list[int]:
    """Pairs of a value and an int64 index, 16 bytes. `max(a, b)` of two tensors is elementwise.

    Source: ReduceArgMaxKernel.cu, ReduceMaxValuesKernel.cu (max_launch_kernel).
    """
    tensor = call.args[0]
    if call.overload == "other":
        return []
    keeps_no_index = call.overload in ("default", "unary_out") and call.op.split(".")[1] in ("max", "min")
    accumulator = max(4, tensor.itemsize) if keeps_no_index else 16
    return reduction_workspace(tensor, _dims(call, 1, tensor), call.device, accumulator)


@workspace("var", "std", "var_mean", "std_mean")
def variance(call: Call) -> list[int]:
    """Welford's four numbers, 16 bytes. Source: ReduceMomentKernel.cu, SharedReduceOps.h (WelfordData)."""
    tensor = call.args[0]
    whole = call.overload == "default"  # its second argument is no dimension
    dims = list(range(len(tensor.shape))) if whole else _dims(call, 1, tensor)
    return reduction_workspace(tensor, dims, call.device, 16 if tensor.itemsize <= 4 else 32)


@workspace("logsumexp")
def logsumexp(call: Call) -> list[int]:
    """The maxima, and the exponentials of the differences, as large as the input; then a sum of those.

    Source: aten/src/ATen/native/ReduceOps.cpp, logsumexp_out_impl.
    """
    tensor, output = call.args[0], call.outputs[0]
    dims = _dims(call, 1, tensor)
    return [output.nbytes, tensor.nbytes, *reduction_workspace(tensor, dims, call.device, max(4, tensor.itemsize))]


@workspace("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
def elementwise_loss(call: Call) -> list[int]:
    """The unreduced loss, before its mean or sum. Source: aten/src/ATen/native/Loss.cpp, cuda/Loss.cu."""
    tensor, output = call.args[0], call.outputs[0]
    if output.numel == tensor.numel:
        return []
    unreduced = Tensor((tensor.numel,), (1,), tensor.dtype)
    return [unreduced.nbytes, *reduction_workspace(unreduced, [0], call.device, max(4, itemsize(tensor.dtype)))]


@workspace("_foreach_norm", "_foreach_max", "_foreach_powsum")
def foreach_norm(call: Call) -> list[int]:
    """Partial results of chunks: a row a tensor, as long as the tensor of most chunks needs.

    Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu (output_per_tensor), MultiTensorApply.cuh (kChunkSize 65536).
    """
    tensors = call.args[0]
    chunks = max((-(-tensor.numel // _CHUNK) for tensor in tensors), default=0)
    accumulator = max(4, call.outputs[0].itemsize) if call.outputs else 4
    return [len(tensors) * chunks * accumulator]


_CHUNK = 65536
