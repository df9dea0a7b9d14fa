"""CUDA's autocast on the CPU, so that a real run with real values can be watched: the oracle of tracer/autocast.py.

The lists are read from the header that torch ships, not from metapeak. Operators that CPU autocast casts to the lower
precision, too, keep PyTorch's own kernel, whose cache of weight casts is the one that CUDA uses; the rest is cast here.
"""

import contextlib
import os
import re
from pathlib import Path

import torch

_HEADER = os.path.join(os.path.dirname(torch.__file__), "include", "ATen", "autocast_mode.h")
_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
# Operators with a list of their own on the CPU, of those that models of the tests run (autocast_mode.cpp, AutocastCPU).
_CPU_LOWER_PRECISION = {
    "conv1d", "conv2d", "conv3d", "bmm", "mm", "linalg_vecdot", "baddbmm", "addmm", "addbmm", "linear", "matmul",
    "_convolution.deprecated", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
    "prelu", "scaled_dot_product_attention",
}  # fmt: skip
_CPU_ONLY = ("grid_sampler_2d", "avg_pool3d", "trace", "polar", "stft", "cross_entropy_loss", "pinverse")


def lists_in_header():
    """{name of the macro: operators as `name` or `name.overload`}."""
    text = Path(_HEADER).read_text(encoding="utf-8").replace("\\\n", " ")
    lists = {}
    for macro in ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE"):
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*)", text)[1]
        found = re.findall(r"_\(([\w ,]+)\)", body)
        lists[macro] = [".".join(part.strip() for part in entry.split(",")) for entry in found]
    lists["DIFFERENT_REDISPATCH_SIGNATURE"] = re.findall(r'"(norm\.\w+)"', text)
    return lists


@contextlib.contextmanager
def cuda_lists_on_cpu():
    """torch.autocast("cpu") then treats operators as torch.autocast("cuda") does."""
    lists = lists_in_header()
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in lists["LOWER_PRECISION_FP"]:
            if name not in _CPU_LOWER_PRECISION:
                library.impl(name, _casting(name, lambda: torch.get_autocast_dtype("cpu")), "AutocastCPU")
        for name in lists["FP32"]:
            library.impl(name, _casting(name, lambda: torch.float32), "AutocastCPU")
        for name in lists["FP32_SET_OPT_DTYPE"]:
            library.impl(name, _with_float32_result(name), "AutocastCPU")
        for name in _CPU_ONLY:
            with contextlib.suppress(RuntimeError):
                library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
        yield


def _overload(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _low(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _casting(name, dtype):
    func = _overload(name)

    def cast(value):
        if isinstance(value, (list, tuple)):
            return type(value)(map(cast, value))
        return value.to(dtype()) if _low(value) else value

    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            return func(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return kernel


def _with_float32_result(name):
    func, packet = _overload(name), name.partition(".")[0]

    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            if kwargs.get("dtype") is None and not any(isinstance(arg, torch.dtype) for arg in args) and _low(args[0]):
                if packet in ("softmax", "log_softmax"):
                    return func(*args[:2], torch.float32)
                return func(*args, **{**kwargs, "dtype": torch.float32})
            return func(*args, **kwargs)

    return kernel
