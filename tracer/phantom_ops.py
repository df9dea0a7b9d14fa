"""Operators that shapes alone do not answer: reads of values, sizes that depend on values, routing, attention."""

from __future__ import annotations

import torch
from metapeak.tracer.errors import DataDependentError
from metapeak.tracer.phantom import DEVICE_NAME, PhantomTensor, _wrap, handles, phantom_from_cpu, run_meta_kernel

aten = torch.ops.aten


@handles(aten._local_scalar_dense.default)
def read_scalar(mode, func, args, kwargs):
    values = mode.values(args[0])
    if values is not None:
        return values.item()
    if args[0].dtype.is_floating_point:
        mode.assume("a number read from the device (.item()) was answered with 1.0")
        return 1.0
    mode.refuse(DataDependentError, func, f"the program reads a {args[0].dtype} value that only a real run computes")


@handles(aten._to_copy.default)
def to_copy(mode, func, args, kwargs):
    (tensor,) = args
    device = kwargs.get("device")
    to_phantom = device is None or device.type == DEVICE_NAME
    if type(tensor) is PhantomTensor and to_phantom:
        return NotImplemented
    if to_phantom:  # from the CPU or meta
        changed = tensor.to(dtype=kwargs.get("dtype") or tensor.dtype)
        return phantom_from_cpu(changed) if tensor.device.type == "cpu" else _wrap(changed.clone())
    if device.type == "meta":
        return run_meta_kernel(func, args, {**kwargs, "device": torch.device("meta")})
    values = mode.values(tensor)
    if values is None:
        mode.refuse(DataDependentError, func, f"the program copies values of shape {tuple(tensor.shape)} to the CPU")
    return values.to(dtype=kwargs.get("dtype") or values.dtype, copy=True)
