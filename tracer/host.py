"""Memory on the host, counted and not taken: what a program offloads may be larger than this machine.

A `HostTensor` says that it lives on the CPU and has a storage on meta, as phantom tensors have. While
`host_memory_counted` is active, large tensors that the program makes on the CPU, and copies of values that nobody
knows, are such tensors. Operators on them run as meta kernels; a number read from one is 1.0, and no flag is set.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch

from metapeak.tracer.answers import flatten_tensors, map_tensors
from metapeak.tracer.phantom import (
    DEVICE_NAME,
    PhantomTensor,
    kernel_is_running,
    run_meta_kernel,
    wrap_meta,
)

_CPU, _META = torch.device("cpu"), torch.device("meta")
_aten = torch.ops.aten
_prim_device = torch.ops.prim.device.default
# Smaller tensors on the CPU are real: step counters, sizes, flags.
SMALLEST = 1 << 10


class HostMemory:
    """Bytes that the program holds on the host: now, and when they were most."""

    active: HostMemory | None = None

    def __init__(self):
        self.current = self.peak = 0

    def hold(self, storage: torch.UntypedStorage) -> None:
        if "on_host" not in storage.__dict__:
            storage.on_host = True
            nbytes = storage.nbytes()
            self.current += nbytes
            self.peak = max(self.peak, self.current)
            weakref.finalize(storage, self._give_back, nbytes)

    def _give_back(self, nbytes: int) -> None:
        self.current -= nbytes

    def answer(self, mode, func, types, args, kwargs):
        """What an operator gives that works on the host's tensors or makes one; NotImplemented for all others.

        `mode` is the PhantomMode that asks. Values that nobody knows and that go into a real CPU tensor are lost.
        """
        if HostTensor in types:
            return _run_on_host(mode, func, args, kwargs)
        unknown = next((arg for arg in args[:2] if type(arg) is PhantomTensor and mode.values(arg) is None), None)
        if func is _aten.copy_.default and type(args[0]) is torch.Tensor and args[0].device == _CPU:
            return NotImplemented if unknown is None else args[0]
        device = kwargs.get("device")
        if device is None or device.type != "cpu":
            return NotImplemented
        copies = func is _aten._to_copy.default
        if copies and unknown is None:
            return NotImplemented
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        made = run_meta_kernel(func, args, {**kwargs, "device": _META})
        if not isinstance(made, torch.Tensor) or (made.numel() < SMALLEST and not copies):
            return NotImplemented
        return HostTensor(made)


class HostTensor(torch.Tensor):
    """A tensor on the host without memory here."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem: torch.Tensor):
        self = torch.Tensor._make_subclass(cls, elem, False, dispatch_device=True, device_for_backend_keys=_CPU)
        if HostMemory.active is not None:
            HostMemory.active.hold(elem.untyped_storage())
        return self

    @property
    def device(self) -> torch.device:
        return _META if kernel_is_running() else _CPU

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is _prim_device:
            return _META if kernel_is_running() else _CPU
        return _run_on_host(None, func, args, kwargs or {})


def _run_on_host(mode, func, args, kwargs):
    """The operator's meta kernel; what it makes or writes on the device is told to the observer of `mode`."""
    if func is _aten._local_scalar_dense.default:
        return 1.0 if args[0].is_floating_point() else 0
    device = kwargs.get("device")
    changed = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if device is not None:
        changed["device"] = _META
    given, changed = map_tensors(args, _without_values), map_tensors(changed, _without_values)
    wrap = wrap_meta if device is not None and device.type == DEVICE_NAME else _on_host
    outputs = map_tensors(run_meta_kernel(func, given, changed), wrap)
    flat: list[torch.Tensor] = []
    flatten_tensors(outputs, flat)
    on_device = [output for output in flat if type(output) is PhantomTensor]
    if on_device and mode is not None:
        for output in on_device:
            mode.forget(output)
        mode._observe(func, args, kwargs, outputs)
    return outputs


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    """Real CPU tensors beside those of the host, as meta kernels take them; numbers as they are."""
    if type(tensor) in (HostTensor, PhantomTensor) or tensor.device.type == "meta" or tensor.dim() == 0:
        return tensor
    return torch.empty_like(tensor, device=_META)


def _on_host(tensor):
    return HostTensor(tensor) if type(tensor) is torch.Tensor and tensor.device.type == "meta" else tensor


@contextlib.contextmanager
def host_memory_counted() -> Iterator[HostMemory]:
    """Inside, what the program holds on the host is counted and takes no memory."""
    before, HostMemory.active = HostMemory.active, HostMemory()
    try:
        yield HostMemory.active
    finally:
        HostMemory.active = before
