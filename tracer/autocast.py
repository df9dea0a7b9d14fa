"""CUDA's autocast on the phantom GPU: its lists of operators, and its cache of cast weights.

A backend written in Python starts without a list. Registered here are CUDA's, above autograd as in PyTorch, so that
casts are recorded and what an operator saves for backward is what it got.

Note [Weight casts]
    Inside an autocast region the low-precision cast of a leaf in float32 that requires grad is made once and kept until
    the outermost region ends; whatever else is cast is cast anew for every use. So trainable weights lie there twice
    until the region ends, also where activations are checkpointed. A recomputed region runs in an autocast region of
    its own (torch.utils.checkpoint re-enters it), whose casts go when it ends.
    Source: aten/src/ATen/autocast_mode.cpp, cached_cast; torch/amp/autocast_mode.py, autocast.__exit__.

Sources: include/ATen/autocast_mode.h (the AT_FORALL lists and what each policy does), autocast_mode.cpp (which lists
CUDA takes). tests/tracer/test_autocast.py compares the lists with the header that torch ships.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from metapeak.tracer.phantom import DEVICE_NAME, PhantomTensor

# Inputs are cast to the region's dtype.
LOWER_PRECISION = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip
# The same, in CUDA's own file.
LOWER_PRECISION_OF_CUDNN = ("cudnn_convolution", "cudnn_convolution_transpose")
# Inputs are cast to float32.
FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
# The operator's own dtype argument is set to float32, unless it is given.
FLOAT32_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
# Run as the overload that takes a dtype, with float32.
FLOAT32_APPENDED = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
# Inputs are cast to the widest dtype among them.
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip
# Refused by PyTorch itself.
BANNED = ("binary_cross_entropy",)

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
# Weights that were cast, by id: (a weak reference, so that an id means what it meant; the cast).
_casts: dict[int, tuple[weakref.ref, torch.Tensor]] = {}
# Told of every cached cast that is used: (the cast, whether it was there already).
_observers: list[Callable[[torch.Tensor, bool], None]] = []


@contextlib.contextmanager
def autocast_as_on_cuda(observe: Callable[[torch.Tensor, bool], None]) -> Iterator[None]:
    """While it lasts, casts are cached and freed as on CUDA, and programs that say "cuda" to autocast mean the phantom
    GPU: `torch.autocast("cuda")`, `torch.is_autocast_enabled()`, custom autograd functions with device_type="cuda".
    `observe` is told of every use of a cached cast, and whether it was in the cache already.
    """
    mode = torch.amp.autocast_mode
    init, cast_inputs, clear = mode.autocast.__init__, mode._cast, torch.clear_autocast_cache
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype

    def init_ours(self, device_type, *args, **kwargs):
        init(self, _ours(device_type), *args, **kwargs)

    def clear_both():
        _casts.clear()
        clear()

    with contextlib.ExitStack() as replaced:
        for owner, name, function in (
            (mode.autocast, "__init__", init_ours),
            (mode, "_cast", lambda value, device_type, dtype: cast_inputs(value, _ours(device_type), dtype)),
            (torch, "clear_autocast_cache", clear_both),
            (torch, "is_autocast_enabled", lambda device_type="cuda": enabled(_ours(device_type))),
            (torch, "get_autocast_dtype", lambda device_type: dtype(_ours(device_type))),
        ):
            replaced.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)
        replaced.callback(_casts.clear)
        _observers.append(observe)
        replaced.callback(_observers.pop)
        yield


def _ours(device_type: Any) -> Any:
    return DEVICE_NAME if device_type == "cuda" else device_type


# -- what each list does -----------------------------------------------------------------------------------------------


def _region_dtype() -> torch.dtype:
    return torch.get_autocast_dtype(DEVICE_NAME)


def _eligible(value: Any) -> bool:
    return type(value) is PhantomTensor and value.is_floating_point() and value.dtype is not torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its eligible tensors in `dtype`; see Note [Weight casts]."""
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype) for item in value)
    if not _eligible(value) or value.dtype is dtype:
        return value
    cached = (
        value.dtype is torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
        and dtype is _region_dtype()
    )
    if not cached:
        return value.to(dtype)
    entry = _casts.get(id(value))
    reused = entry is not None and entry[0]() is value
    if not reused:
        entry = _casts[id(value)] = (weakref.ref(value), value.to(dtype))
    for observe in _observers:
        observe(entry[1], reused)
    return entry[1]


def _casting(func, dtype_of):
    """A kernel that casts all inputs to dtype_of(its inputs)."""

    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            dtype = dtype_of((*args, *kwargs.values()))
            return func(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})

    return kernel


def _widest(values: tuple) -> torch.dtype:
    """float32 where one of the tensors is in float32, else the region's dtype."""
    region = widest = _region_dtype()
    for value in values:
        for tensor in value if type(value) in (list, tuple) else (value,):
            if not _eligible(tensor):
                continue
            if torch.float32 in (widest, tensor.dtype):
                widest = torch.float32
            elif tensor.dtype is not region:
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return widest


def _setting_dtype(func):
    names = [argument.name for argument in func._schema.arguments if not argument.kwarg_only]

    def kernel(*args, **kwargs):
        given = dict(zip(names, args)).get("dtype", kwargs.get("dtype"))
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if given is None and _eligible(args[0]):
                args = args[: names.index("dtype")] if "dtype" in names else args
                return func(*args, **{**kwargs, "dtype": torch.float32})
            return func(*args, **kwargs)

    return kernel


def _appending_dtype(func, with_dtype):
    """`func` as the overload `with_dtype`, whose arguments are the same but for `dtype`."""
    arguments = [(argument.name, argument.default_value) for argument in func._schema.arguments]

    def kernel(*args, **kwargs):
        given = {**dict(zip((name for name, _ in arguments), args)), **kwargs}
        dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return with_dtype(*(given.get(name, default) for name, default in arguments), dtype=dtype)

    return kernel


def _banned(*args, **kwargs):
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast, PyTorch refuses them. "
        "Use binary_cross_entropy_with_logits or BCEWithLogitsLoss."
    )


def _operator(name: str):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


_library = torch.library.Library("aten", "IMPL")
_everything_else = torch.library.Library("_", "IMPL")


def _register() -> None:
    kernels = {
        **{
            name: _casting(_operator(name), lambda inputs: _region_dtype())
            for name in LOWER_PRECISION + LOWER_PRECISION_OF_CUDNN
        },
        **{name: _casting(_operator(name), lambda inputs: torch.float32) for name in FLOAT32},
        **{name: _setting_dtype(_operator(name)) for name in FLOAT32_RESULT},
        **{name: _casting(_operator(name), _widest) for name in WIDEST},
        **dict.fromkeys(BANNED, _banned),
    }
    for name, overload in FLOAT32_APPENDED.items():
        packet = name.partition(".")[0]
        kernels[name] = _appending_dtype(_operator(name), _operator(f"{packet}.{overload}"))
    for name, kernel in kernels.items():
        _library.impl(name, kernel, "AutocastPrivateUse1")
    _everything_else.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


_register()
