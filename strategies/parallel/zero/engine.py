"""One rank of a DeepSpeed job: `deepspeed.initialize` on the phantom GPU, and what its tensors are for.

Names of attributes are those of deepspeed 0.19.8: runtime/zero/stage_1_and_2.py, stage3.py, partition_parameters.py,
runtime/bf16_optimizer.py, runtime/fp16/fused_optimizer.py and unfused_optimizer.py.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed

from metapeak.strategies.parallel.zero.accelerator import deepspeed, deepspeed_on_phantom
from metapeak.tracer.host import host_memory_counted
from metapeak.tracer.liveness import Category
from metapeak.tracer.optimizer_states import mark_optimizer_states, optimizer_tensors, plain_tensors
from metapeak.tracer.phantom import PhantomTensor

# What DeepSpeed's optimizers hold before the first step, by attribute.
_HELD = {
    "lp_param_buffer": ("partitions of the parameters", Category.PARAMETER),
    "bit16_groups_flat": ("flat parameters", Category.PARAMETER),
    "bf16_groups_flat": ("flat parameters", Category.PARAMETER),
    "fp16_groups_flat": ("flat parameters", Category.PARAMETER),
    "fp32_partitioned_groups_flat": ("fp32 partitions", Category.OPTIMIZER_STATE),
    "single_partition_of_fp32_groups": ("fp32 partitions", Category.OPTIMIZER_STATE),
    "fp32_groups_flat_partition": ("fp32 partitions", Category.OPTIMIZER_STATE),
    "fp32_groups_flat": ("fp32 parameters", Category.OPTIMIZER_STATE),
    "fp32_groups": ("fp32 parameters", Category.OPTIMIZER_STATE),
    "grad_partitions_flat_buffer": ("partitions of the gradients", Category.GRADIENT),
    "fp32_groups_gradients_flat": ("fp32 gradients", Category.GRADIENT),
}
# Where partitions of gradients are kept during a step.
_GRADIENTS = ("averaged_gradients", "all_grad_tensors")


class DeepSpeedRank:
    """An Engine (see tracer/engine.py)."""

    def __init__(self, module: torch.nn.Module, optimizer: Any, config: Mapping[str, Any]):
        self.module = module
        self._recorder: Any = None
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in self._parameters:  # before DeepSpeed's own hooks, which take the gradient away
            parameter.register_post_accumulate_grad_hook(self._mark_gradient)
        self.model, self.optimizer, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=dict(config))

    def load(self, recorder: Any) -> None:
        self._recorder = recorder
        for name, parameter in self.module.named_parameters():
            if type(getattr(parameter, "ds_tensor", None)) is PhantomTensor:  # not on the host
                recorder.load(parameter.ds_tensor, f"{name} (partition)", Category.PARAMETER)
        for attribute, (name, category) in _HELD.items():
            for tensor in _tensors(getattr(self.optimizer, attribute, None)):
                recorder.load(tensor, name, category)
        for tensor in _tensors(self._buckets()):
            recorder.load(tensor, "bucket of gradients", Category.COMMUNICATION)
        for _, tensor in optimizer_tensors(self.model.basic_optimizer):
            if type(tensor) is PhantomTensor:
                recorder.load(tensor, "optimizer state", Category.OPTIMIZER_STATE)
        for tensor in _everything_else():
            recorder.load(tensor, "held by DeepSpeed", Category.BUFFER)

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)
        self._mark_states()

    def step(self) -> None:
        self.model.step()
        self._mark_states()

    def gathered(self, parameters: list[torch.Tensor]) -> None:
        """ZeRO-3 has put together these parameters."""
        if self._recorder is not None:
            for parameter in parameters:
                self._recorder.mark_unsharded(parameter.data, Category.PARAMETER, parameter)

    def note_host(self, nbytes: int) -> None:
        self._recorder.graph.host_bytes = nbytes

    def _mark_gradient(self, parameter: torch.Tensor) -> None:
        if self._recorder is not None:
            self._recorder.mark_unsharded(parameter.grad, Category.GRADIENT, parameter)

    def _mark_states(self) -> None:
        for attribute in _GRADIENTS:
            for tensor in _tensors(getattr(self.optimizer, attribute, None)):
                self._recorder.mark(tensor, Category.GRADIENT, None)
        for tensor in _tensors(self._buckets()):
            self._recorder.mark(tensor, Category.COMMUNICATION, None)
        mark_optimizer_states(self._recorder, self.model.basic_optimizer)

    def _buckets(self) -> list[Any]:
        buckets = getattr(self.optimizer, "ipg_buckets", None) or {}
        return [getattr(bucket, "buffer", None) for bucket in buckets.values()]


def _tensors(value: Any) -> Iterator[PhantomTensor]:
    for tensor in plain_tensors(value):
        if type(tensor) is PhantomTensor:
            yield tensor


def _everything_else() -> list[PhantomTensor]:
    """Tensors with memory on the phantom GPU that nobody has registered."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) is PhantomTensor]
    storages = {id(one.untyped_storage()): one for one in found if one.untyped_storage().nbytes()}
    return [one for one in storages.values() if "row" not in one.untyped_storage().__dict__]


@contextlib.contextmanager
def deepspeed_rank(
    module: torch.nn.Module, make_optimizer: Callable[[list], Any] | None, config: Mapping[str, Any]
) -> Iterator[DeepSpeedRank]:
    """The engine of this rank of the current process group.

    None for `make_optimizer` is DeepSpeed's own Adam: FusedAdam, or DeepSpeedCPUAdam where it is offloaded.
    """
    world_size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    own = deepspeed.ops.adam.FusedAdam
    if "offload_optimizer" in config["zero_optimization"]:
        own = deepspeed.ops.adam.DeepSpeedCPUAdam
    with host_memory_counted() as host, deepspeed_on_phantom(world_size, rank):
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        engine = DeepSpeedRank(module, (make_optimizer or own)(trainable), config)
        with _gathers_watched(engine.gathered):
            yield engine
            engine.note_host(host.peak)


@contextlib.contextmanager
def _gathers_watched(gathered: Callable[[list], None]) -> Iterator[None]:
    """`gathered(parameters)` is told of what an all-gather of ZeRO-3 has put together."""
    where = deepspeed.runtime.zero.partition_parameters

    def watched(handle: type, parameters_of: Callable[[Any], list]):
        original = handle.wait

        def wait(self, *arguments, **options):
            result = original(self, *arguments, **options)
            gathered(parameters_of(self))
            return result

        return mock.patch.object(handle, "wait", wait)

    with (
        watched(where.AllGatherHandle, lambda handle: [handle._AllGatherHandle__param]),
        watched(where.AllGatherCoalescedHandle, lambda handle: handle.params),
    ):
        yield
