"""Operators that shapes alone do not answer: reads of values, sizes that depend on values, choices such as routing.

Three kinds of answers, in this order:

known      the operator's inputs have known values (see phantom.py, Note [Known values]): the real result is computed.
assumed    a convention stands for what only a real run computes, and the report prints it: Note [Balanced choices],
           Note [Healthy numbers].
refused    everything else that would decide a size or a branch: DataDependentError with the operator and its module.

Note [Balanced choices]
    topk, argmax, sort, multinomial and the like turn numbers that nobody knows into indices, on which sizes depend:
    how many tokens an expert gets, how many keys a query keeps. Their integer results get values by a rule. Of E
    candidates along the dimension, row i of the others chooses (i * k + j) mod E as its j-th of k: each candidate is
    chosen equally often, to within one. So mixtures of experts are routed uniformly and everything computed from the
    choices (one_hot, bincount, cumsum, where, index) is computed on real values. sort keeps the order it finds.

Note [Healthy numbers]
    Programs check for NaN and infinity; a run that is worth planning for has none. isnan and isinf are
    False everywhere.
"""

from __future__ import annotations

import functools

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from metapeak.tracer.dispatch import PhantomMode, handles
from metapeak.tracer.errors import DataDependentError, TraceError
from metapeak.tracer.phantom import (
    DEVICE_NAME,
    HostCopy,
    PhantomTensor,
    phantom_from_cpu,
    run_meta_kernel,
    small_enough_to_know,
    wrap_meta,
)

aten = torch.ops.aten

BALANCED_CHOICES = (
    "choices of the largest values (MoE routing with topk or argmax, sorting, sampling) are uniform: they fall on "
    "every candidate equally often"
)
RECURRENT_CELLS = "LSTM and GRU layers run PyTorch's fused cells step by step; cuDNN's kernels keep less per step"
HEALTHY_NUMBERS = "no activation or gradient is NaN or infinite"
SCALAR_READ = "a number read from the device (.item()) was answered with 1.0"


# -- reads -------------------------------------------------------------------------------------------------------------


@handles(aten._local_scalar_dense.default)
def read_scalar(mode, func, args, kwargs):
    values = mode.values(args[0])
    if values is not None:
        return values.item()
    if args[0].dtype.is_floating_point:
        mode.assume(SCALAR_READ)
        return 1.0
    mode.refuse(DataDependentError, func, f"the program reads a {args[0].dtype} value that only a real run computes")


def _read_below_python(tensor):
    """A read that skips dispatch modes: `torch.tensor([...])` on a list that holds tensors of the phantom GPU."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, PhantomMode):
            return read_scalar(mode, aten._local_scalar_dense.default, (tensor,), {})
    raise TraceError("a tensor of the phantom GPU was read outside the traced step")


_library = torch.library.Library("aten", "IMPL")
_library.impl("_local_scalar_dense", _read_below_python, "PrivateUse1")


@handles(aten.equal.default)
def equal(mode, func, args, kwargs):
    left, right = (mode.values(tensor) for tensor in args)
    if left is None or right is None:
        mode.refuse(DataDependentError, func, "the program compares tensors whose values only a real run computes")
    return torch.equal(left, right)


@handles(aten._to_copy.default)
def to_copy(mode, func, args, kwargs):
    (tensor,) = args
    device = kwargs.get("device")
    to_phantom = device is None or device.type == DEVICE_NAME
    if type(tensor) is PhantomTensor and to_phantom:
        return NotImplemented
    if type(tensor) is HostCopy and to_phantom:
        return tensor.back()
    if to_phantom:  # from the CPU or meta
        changed = tensor.to(dtype=kwargs.get("dtype") or tensor.dtype)
        return phantom_from_cpu(changed) if tensor.device.type == "cpu" else wrap_meta(changed.clone())
    if device.type == "meta":
        return run_meta_kernel(func, args, {**kwargs, "device": torch.device("meta")})
    values = mode.values(tensor)
    if values is None:
        reason = f"the program reads values of shape {tuple(tensor.shape)} on the CPU that only a real run computes"
        return HostCopy(tensor, functools.partial(mode.refuse, DataDependentError, func, reason))
    return values.to(dtype=kwargs.get("dtype") or values.dtype, copy=True)


@handles(aten.to.device, aten.to.other, aten.to.dtype_layout)
def to_below_autograd(mode, func, args, kwargs):
    """`.to` inside a handler of DTensor arrives whole, because autograd has been passed: it is its parts here, too."""
    with mode._again():
        return func.decompose(*args, **kwargs)


# -- sizes that depend on values ---------------------------------------------------------------------------------------


@handles(
    aten.nonzero,
    aten.masked_select,
    aten.bincount,
    aten.repeat_interleave.Tensor,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.unique_dim_consecutive,
)
def size_from_values(mode, func, args, kwargs):
    """Operators whose result has a size that depends on all their tensors, or on the mask alone (masked_select)."""
    if func is aten.masked_select.default:
        return _masked_select(mode, func, *args)
    if kwargs.get("output_size") is not None:
        return NotImplemented
    values = [mode.values(item) if isinstance(item, torch.Tensor) else item for item in args]
    for item, value in zip(args, values):
        if isinstance(item, torch.Tensor) and value is None:
            _refuse_size(mode, func, item)
    return _phantoms(func(*values, **kwargs))


def _masked_select(mode, func, tensor, mask):
    mask_values, values = mode.values(mask), mode.values(tensor)
    if mask_values is None:
        _refuse_size(mode, func, mask)
    if values is not None:
        return phantom_from_cpu(torch.masked_select(values, mask_values))
    count = int(torch.broadcast_to(mask_values, torch.broadcast_shapes(tensor.shape, mask.shape)).sum())
    return _new(tensor, (count,))


@handles(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(mode, func, args, kwargs):
    """tensor[indices]: boolean masks become the indices of their true elements, as the CUDA kernel turns them."""
    tensor, indices = args
    if not _has_mask(indices):
        return NotImplemented
    expanded = _indices_of_masks(mode, func, tensor, indices)
    values, index_values = mode.values(tensor), _values_of_all(mode, indices)
    output = _meta(func, (tensor, expanded), kwargs)
    if values is not None and index_values is not None:
        output.known = func(values, index_values)
    return output


@handles(aten.index_put_, aten._index_put_impl_, aten.index_put, aten._unsafe_index_put)
def index_put(mode, func, args, kwargs):
    """tensor[indices] = values. A mask with one value is a masked_fill on CUDA; otherwise it becomes indices."""
    tensor, indices, written = args[:3]
    if not _has_mask(indices):
        return NotImplemented
    in_place = func.overloadpacket not in _RETURN_A_COPY
    cpu = [mode.values(tensor), _values_of_all(mode, indices), mode.values(written)]
    all_known = all(value is not None for value in cpu)
    one_index = sum(item is not None for item in indices) == 1
    if one_index and written.numel() == 1 and not all_known and not _argument(func, args, kwargs, "accumulate"):
        # canDispatchToMaskedFill in TensorAdvancedIndexing.cpp: no size depends on the mask.
        outputs = tensor if in_place else _meta(aten.clone.default, (tensor,), {})
    else:
        outputs = _meta(func, (tensor, _indices_of_masks(mode, func, tensor, indices), written, *args[3:]), kwargs)
    if all_known:
        known = func(*cpu, *args[3:], **kwargs)
        if not in_place:
            outputs.known = known
    elif in_place:
        mode.forget(tensor)
    return tensor if in_place else outputs


_RETURN_A_COPY = (aten.index_put, aten._unsafe_index_put)


def _has_mask(indices) -> bool:
    return any(item is not None and item.dtype in (torch.bool, torch.uint8) for item in indices)


def _values_of_all(mode, indices):
    """The indices' values on the CPU, or None when one is not known."""
    values = [None if item is None else mode.values(item) for item in indices]
    return None if any(item is not None and value is None for item, value in zip(indices, values)) else values


def _indices_of_masks(mode, func, tensor, indices) -> list[PhantomTensor | None]:
    """`indices` into `tensor` with every mask of n dimensions replaced by n index tensors, for their shapes only."""
    expanded: list[PhantomTensor | None] = []
    for item in indices:
        if item is None or item.dtype not in (torch.bool, torch.uint8):
            expanded.append(item)
            continue
        covered = tensor.shape[len(expanded) : len(expanded) + item.dim()]
        if item.shape != covered:
            raise IndexError(f"a mask of shape {tuple(item.shape)} indexes dimensions of sizes {tuple(covered)}")
        values = mode.values(item)
        if values is None:
            _refuse_size(mode, func, item)
        count = int(values.count_nonzero())
        columns = torch.empty(item.dim(), count, dtype=torch.int64, device="meta")
        expanded.extend(wrap_meta(column) for column in columns)
    return expanded


@handles(aten.masked_fill.Tensor, aten.masked_fill_.Tensor)
def masked_fill(mode, func, args, kwargs):
    """CUDA takes the value from the CPU too; the meta kernel wants it beside the tensor."""
    tensor, mask, value = args
    if type(value) is PhantomTensor or value.device.type != "cpu":
        return NotImplemented
    in_place = func is aten.masked_fill_.Tensor
    outputs = _meta(aten.masked_fill.Scalar, (tensor, mask, value.item()), {})
    values = mode.values(tensor), mode.values(mask)
    if all(value is not None for value in values):
        known = func(*values, value)
        if not in_place:
            outputs.known = known
    elif in_place:
        mode.forget(tensor)
    return tensor if in_place else outputs


def _refuse_size(mode, func, tensor) -> None:
    mode.refuse(
        DataDependentError,
        func,
        f"the size of its result depends on {tensor.dtype} values of shape {tuple(tensor.shape)} that only a real run "
        "computes",
    )


# -- Note [Balanced choices] -------------------------------------------------------------------------------------------


def balanced(rows: int, choices: int, candidates: int) -> torch.Tensor:
    """Indices of shape [rows, choices] below `candidates`, each of them equally often to within one.

    >>> balanced(3, 2, 4).tolist()
    [[0, 1], [2, 3], [0, 1]]
    """
    return (torch.arange(rows * choices) % max(candidates, 1)).view(rows, choices)


def _choose(mode, outputs, position: int | None, candidates: int, dim: int, keepdim: bool = True) -> None:
    """Give the integer output at `position` (None: the only one) balanced values along `dim`."""
    indices = outputs if position is None else outputs[position]
    if indices.numel() > CHOICES_LIMIT:
        return
    mode.assume(BALANCED_CHOICES)
    if indices.dim() == 0 or not keepdim:
        indices.known = balanced(indices.numel(), 1, candidates).view(indices.shape).clone()
        return
    others = list(indices.shape)
    choices = others.pop(dim)
    known = balanced(indices.numel() // max(choices, 1), choices, candidates).view(*others, choices)
    indices.known = known.movedim(-1, dim).contiguous()


CHOICES_LIMIT = 1 << 22


def _unknown_input(mode, args) -> bool:
    return mode.values(args[0]) is None


@handles(aten.topk.default)
def topk(mode, func, args, kwargs):
    if not _unknown_input(mode, args):
        return NotImplemented
    outputs = _meta(func, args, kwargs)
    dim = _argument(func, args, kwargs, "dim")
    _choose(mode, outputs, 1, _size(args[0], dim), dim)
    return outputs


@handles(aten.sort.default, aten.sort.stable)
def sort(mode, func, args, kwargs):
    """The order stays as it is."""
    if not _unknown_input(mode, args):
        return NotImplemented
    outputs = _meta(func, args, kwargs)
    indices, dim = outputs[1], _argument(func, args, kwargs, "dim")
    if indices.numel() <= CHOICES_LIMIT:
        mode.assume(BALANCED_CHOICES)
        order = torch.arange(_size(indices, dim))
        known = order.view([-1 if axis == dim % max(indices.dim(), 1) else 1 for axis in range(indices.dim())])
        indices.known = known.expand(indices.shape).contiguous()
    return outputs


@handles(aten.argmax.default, aten.argmin.default)
def argmax(mode, func, args, kwargs):
    if not _unknown_input(mode, args):
        return NotImplemented
    outputs = _meta(func, args, kwargs)
    dim = _argument(func, args, kwargs, "dim")
    _choose(mode, outputs, None, _size(args[0], dim) if dim is not None else args[0].numel(), dim or 0, keepdim=False)
    return outputs


@handles(aten.max.dim, aten.min.dim, aten.median.dim, aten.mode.default, aten.kthvalue.default)
def largest_along(mode, func, args, kwargs):
    if not _unknown_input(mode, args):
        return NotImplemented
    outputs = _meta(func, args, kwargs)
    dim = _argument(func, args, kwargs, "dim")
    _choose(mode, outputs, 1, _size(args[0], dim), dim, keepdim=False)
    return outputs


@handles(aten.multinomial.default)
def multinomial(mode, func, args, kwargs):
    outputs = _meta(func, args, kwargs)
    _choose(mode, outputs, None, args[0].size(-1), -1)
    return outputs


def _size(tensor, dim: int) -> int:
    return tensor.size(dim) if tensor.dim() else 1


def _argument(func, args, kwargs, name: str):
    """The value of an argument by name, or the schema's default."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    raise KeyError(name)


# -- Note [Healthy numbers] --------------------------------------------------------------------------------------------


@handles(aten.isnan.default, aten.isinf.default)
def no_nan(mode, func, args, kwargs):
    if not _unknown_input(mode, args):
        return NotImplemented
    mode.assume(HEALTHY_NUMBERS)
    if func is aten.isinf.default and args[0].is_floating_point():
        with mode._again():  # aten/src/ATen/native/TensorCompare.cpp, isinf: abs, then a comparison
            output = args[0].abs() == float("inf")
    else:
        output = _meta(func, args, kwargs)
    # One element stands for all: a write into it makes the values unknown, see phantom.py.
    output.known = torch.zeros((), dtype=torch.bool).expand(output.shape)
    return output


@handles(aten._amp_foreach_non_finite_check_and_unscale_.default)
def unscale(mode, func, args, kwargs):
    """GradScaler's check of the gradients: `found_inf` stays what it was, so that no step is skipped."""
    mode.assume(HEALTHY_NUMBERS)
    for gradient in args[0]:
        mode.forget(gradient)


# -- tensors whose values do not depend on the tensor they are like ----------------------------------------------------


FILLED_FLOATS_LIMIT = 1 << 20  # larger ones accumulate hidden states, which nobody reads
FILLED_WHOLE = 1 << 16  # larger ones are optimizer states and shards: one element stands for all until a write


@handles(aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full)
def filled(mode, func, args, kwargs):
    """Known although the tensor that gives the shape is not: masks are made like this and written afterwards."""
    if kwargs.get("device") == torch.device("meta"):  # asked for by the program: no memory
        return run_meta_kernel(func, args, kwargs)
    if mode.values(args[0]) is not None:
        return NotImplemented
    device = kwargs.get("device")
    if device is not None and device.type == "cpu":
        like = torch.empty(args[0].shape, dtype=args[0].dtype)
        return func(like, *args[1:], **kwargs)
    output = _meta(func, args, {**kwargs, "device": torch.device("meta")} if device is not None else kwargs)
    if small_enough_to_know(output) and not (output.is_floating_point() and output.numel() > FILLED_FLOATS_LIMIT):
        value = {"zeros": 0, "ones": 1}.get(func.overloadpacket.__name__.replace("new_", "").replace("_like", ""))
        value = _argument(func, args, kwargs, "fill_value") if value is None else value
        value = mode.values(value) if isinstance(value, torch.Tensor) else value
        if value is not None:
            whole = not output.is_floating_point() or output.numel() <= FILLED_WHOLE
            values = torch.full(output.shape if whole else (), value, dtype=output.dtype)
            output.known = values.expand(output.shape)
    return output


# -- shape rules for operators without a meta kernel -------------------------------------------------------------------


@handles(aten._ctc_loss)
def ctc_loss(mode, func, args, kwargs):
    """(loss [B], log_alpha [B, time, 2 * longest target + 1]).

    Source: aten/src/ATen/native/cuda/LossCTC.cu, ctc_loss_gpu_template.
    """
    log_probs, _, _, target_lengths = args[:4]
    lengths = mode.values(target_lengths) if isinstance(target_lengths, torch.Tensor) else target_lengths
    if lengths is None:
        _refuse_size(mode, func, target_lengths)
    longest = max((int(length) for length in lengths), default=0)
    time, batch = log_probs.shape[:2]
    return _new(log_probs, (batch,)), _new(log_probs, (batch, time, 2 * longest + 1))


@handles(aten._ctc_loss_backward)
def ctc_loss_backward(mode, func, args, kwargs):
    """The gradient of the log probabilities, [time, B, classes]. Its log_beta is the kernel's own (LossCTC.cu)."""
    return _new(args[1], args[1].shape)


@handles(aten._thnn_fused_gru_cell.default)
def gru_cell(mode, func, args, kwargs):
    """(hidden [B, H], workspace [B, 5 H]). Source: aten/src/ATen/native/cuda/RNN.cu, _thnn_fused_gru_cell_cuda."""
    mode.assume(RECURRENT_CELLS)
    batch, hidden = args[2].shape
    return _new(args[2], (batch, hidden)), _new(args[2], (batch, 5 * hidden))


@handles(aten._thnn_fused_gru_cell_backward.default)
def gru_cell_backward(mode, func, args, kwargs):
    """(grad of input gates [B, 3 H], of hidden gates [B, 3 H], of hidden [B, H], of the two biases [3 H] or None)."""
    grad, _, has_bias = args
    batch, hidden = grad.shape
    gates = [_new(grad, (batch, 3 * hidden)) for _ in range(2)]
    biases = [_new(grad, (3 * hidden,)) if has_bias else None for _ in range(2)]
    return (*gates, _new(grad, (batch, hidden)), *biases)


@handles(aten._thnn_fused_lstm_cell.default)
def lstm_cell(mode, func, args, kwargs):
    mode.assume(RECURRENT_CELLS)
    return NotImplemented


@handles(aten._grouped_mm.default)
def grouped_mm(mode, func, args, kwargs):
    """The matrices' products in their own dtype: CUDA falls back to one product a group for fp16 and float32, while the
    meta kernel takes bf16 only. Source: aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda.
    """
    if args[0].dtype is torch.bfloat16:
        return NotImplemented
    in_bf16 = [torch.empty_strided(t.shape, t.stride(), dtype=torch.bfloat16, device="meta") for t in args[:2]]
    product = run_meta_kernel(func, (*in_bf16, *args[2:]), {**kwargs, "out_dtype": None})
    dtype = kwargs.get("out_dtype") or args[0].dtype
    return wrap_meta(torch.empty_strided(product.shape, product.stride(), dtype=dtype, device="meta"))


def _new(like, shape) -> PhantomTensor:
    return wrap_meta(torch.empty(shape, dtype=like.dtype, device="meta"))


# -- helpers -----------------------------------------------------------------------------------------------------------


def _meta(func, args, kwargs):
    """Results of the meta kernel as phantom tensors, without known values."""
    return _map_wrap(run_meta_kernel(func, args, kwargs))


def _map_wrap(value):
    if isinstance(value, torch.Tensor):
        return wrap_meta(value)
    return (
        type(value)(_map_wrap(item) for item in value)
        if type(value) in (list, tuple)
        else tuple(_map_wrap(item) for item in value)
    )


def _phantoms(value):
    """CPU results as phantom tensors that know their values."""
    if isinstance(value, torch.Tensor):
        return phantom_from_cpu(value)
    return tuple(_phantoms(item) for item in value)
