"""DeepSpeed on the phantom GPU: an accelerator that answers as CUDA's does, and the few functions that need values.

DeepSpeed asks everything about the device of `deepspeed.accelerator.get_accelerator()`. Sources: deepspeed 0.19.8
accelerator/abstract_accelerator.py and cuda_accelerator.py. Importing this module imports DeepSpeed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from metapeak.tracer.phantom import DEVICE, DEVICE_NAME, PhantomTensor

with contextlib.redirect_stdout(io.StringIO()):  # its logger writes to stdout, where reports go
    import deepspeed
    import deepspeed.comm.comm
    import deepspeed.ops.adam
    import deepspeed.runtime.bf16_optimizer
    import deepspeed.runtime.utils
    import deepspeed.runtime.zero.partition_parameters
    import deepspeed.runtime.zero.stage3
    import deepspeed.utils.groups
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

_device = getattr(torch, DEVICE_NAME)


class _Kernels:
    """An extension of DeepSpeed's: its kernels write in place, which no storage notices."""

    def load(self, verbose: bool = True) -> _Kernels:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: None


class PhantomAccelerator(CPU_Accelerator):
    """What CUDA_Accelerator answers, for the phantom GPU; what is not said here needs no device."""

    def __init__(self):
        super().__init__()
        self._name, self._communication_backend_name = DEVICE_NAME, "fake"

    # As CUDA: work is asynchronous, and nothing holds the host back.
    def is_synchronized_device(self):
        return False

    def device_name(self, device_index=None):
        return DEVICE_NAME if device_index is None else f"{DEVICE_NAME}:{device_index}"

    def device(self, device_index=None):
        return DEVICE

    def current_device(self):
        return 0

    def current_device_name(self):
        return f"{DEVICE_NAME}:0"

    def device_count(self):
        return 1

    @property
    def Stream(self):
        return _device.Stream

    @property
    def Event(self):
        return _device.Event

    def stream(self, stream):
        return _device.stream(stream)

    def current_stream(self, device_index=None):
        return _device.current_stream()

    def default_stream(self, device_index=None):
        return _device.default_stream()

    def memory_allocated(self, device_index=None):
        return 0

    max_memory_allocated = memory_cached = max_memory_cached = memory_reserved = max_memory_reserved = memory_allocated

    def available_memory(self, device_index=None):
        return 1 << 60  # with too little, stages 1 and 2 flatten on the host; what they hold afterwards is the same

    total_memory = available_memory

    def memory_stats(self, device_index=None):
        return {}

    def is_fp16_supported(self):
        return True

    def supported_dtypes(self):
        return [torch.float, torch.half, torch.bfloat16]

    def on_accelerator(self, tensor):
        return tensor.device.type == DEVICE_NAME

    @property
    def FloatTensor(self):
        return lambda data: torch.tensor(data, dtype=torch.float32, device=DEVICE)

    @property
    def ByteTensor(self):
        return lambda data: torch.tensor([int(item) for item in data], dtype=torch.uint8, device=DEVICE)

    @property
    def IntTensor(self):
        return lambda data: torch.tensor(data, dtype=torch.int32, device=DEVICE)

    def create_op_builder(self, op_name):
        return None  # the shared-memory collectives of the CPU

    def get_op_builder(self, class_name):
        return _Kernels


@contextlib.contextmanager
def deepspeed_on_phantom(world_size: int, rank: int) -> Iterator[None]:
    """Inside, DeepSpeed's accelerator is the phantom GPU, and its process groups are those of the current world.

    What DeepSpeed keeps globally is as before afterwards: accelerator, process groups, and F.linear, which ZeRO-3
    replaces (runtime/zero/partition_parameters.py, _enable_mem_efficient_linear).
    """
    groups = deepspeed.utils.groups
    before = {name: value for name, value in vars(groups).items() if not callable(value) and not name.startswith("__")}
    linear = torch.nn.functional.linear
    environment = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(real_accelerator, "ds_accelerator", PhantomAccelerator()),
        mock.patch.object(deepspeed.comm.comm, "cdb", None),
        mock.patch.object(deepspeed.ops.adam.fused_adam, "FusedAdamBuilder", _Kernels),
        mock.patch.object(deepspeed.ops.adam.cpu_adam, "CPUAdamBuilder", _Kernels),
        mock.patch.object(deepspeed.runtime.zero.stage3, "defragment", _defragmented),
        _replaced("is_invalid_grad_norm", _never_invalid),
        _replaced("has_inf_or_nan", _never_infinite),
        _replaced("clip_tensors_by_global_norm", _clipped_by_a_number),
        _replaced("see_memory_usage", lambda function: lambda *arguments, **options: None),
    ):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch has newer names of collectives
                yield
        finally:
            torch.nn.functional.linear = linear
            vars(groups).update(before)


@contextlib.contextmanager
def _replaced(name: str, wrap: Any) -> Iterator[None]:
    """A function of deepspeed/runtime/utils.py replaced by `wrap(function)` in every module that imported it."""
    function = getattr(deepspeed.runtime.utils, name)
    wrapped = wrap(function)
    where = [
        module
        for path, module in list(sys.modules.items())
        if path.startswith("deepspeed.") and vars(module).get(name) is function
    ]
    for module in where:
        setattr(module, name, wrapped)
    try:
        yield
    finally:
        for module in where:
            setattr(module, name, function)


def _never_invalid(function):
    """`is_invalid_grad_norm`: the norm of a run worth planning for is valid. Its temporaries are there."""

    def is_invalid_grad_norm(norm):
        if type(norm) is not PhantomTensor:
            return function(norm)
        (~torch.isfinite(norm) | (norm < 0)).any()
        return False

    return is_invalid_grad_norm


def _never_infinite(function):
    """`has_inf_or_nan`: a known False on the device, after the reductions that look for one."""

    def has_inf_or_nan(tensor):
        found = function(tensor)
        return torch.zeros((), dtype=torch.bool, device=found.device)

    return has_inf_or_nan


def _clipped_by_a_number(function):
    """`clip_tensors_by_global_norm` with a norm that can be compared; it scales in place or not at all."""

    def clip_tensors_by_global_norm(input_tensors, max_norm=1.0, global_norm=None, **options):
        known = 1.0 if type(global_norm) is PhantomTensor else global_norm
        return function(input_tensors, max_norm, known, **options)

    return clip_tensors_by_global_norm


def _defragmented(tensors: list[torch.Tensor]) -> torch.Tensor:
    """`defragment` of deepspeed/runtime/zero/utils.py without the copy through the host: views of one flat buffer."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    offset = 0
    for tensor in tensors:
        count = tensor.numel()
        tensor.data = flat.narrow(0, offset, count)
        offset += count
    return flat
