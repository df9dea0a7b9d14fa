"""Fully sharded data parallelism of torch (FSDP2, `fully_shard`): ZeRO 3, or 2 without resharding.

What it changes: parameters, gradients and optimizer states are sharded over `dp_shard` x `cp` ranks and gathered unit
by unit; with `dp_replicate` the shards are replicated (HSDP). Experts that `ep` spreads are units of their own.
Where each byte comes from: torch's own `fully_shard` runs on the phantom GPU, as one rank of the world.
Buffers of collectives are allocated on streams of their own, which share no cached memory (tracer/recorder.py).
Sources: torch/distributed/fsdp/_fully_shard; accelerate 1.15 utils/fsdp_utils.py (fsdp2_prepare_model).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metapeak.strategies.base import NoOpStrategy
from metapeak.strategies.optimizers.on_shards import check_on_shards
from metapeak.strategies.parallel.expert_parallel import shard_experts
from metapeak.strategies.parallel.host_shards import host_bytes, keep_on_host, without_host
from metapeak.strategies.parallel.layout import NO_LAYOUT, Layout
from metapeak.strategies.parallel.meshes import data_parallel_mesh
from metapeak.strategies.parallel.units import BLOCKS, cast_up, units_of
from metapeak.tracer.errors import InputError
from metapeak.tracer.gpus import GIB

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.graph import StepGraph
    from metapeak.tracer.liveness import Liveness
    from metapeak.tracer.models import ResolvedModel
    from metapeak.tracer.spec import StepSpec


@dataclass(frozen=True, kw_only=True)
class FSDP2(NoOpStrategy):
    """`fully_shard` on every unit and then on the whole model.

    `wrap` names the units (see units.py); what no unit holds is sharded by the root.
    `reshard_after_forward` is that of `fully_shard`: None (all units but the root), True, False or a number of ranks.
    `param_dtype`, `reduce_dtype` and `output_dtype` make the MixedPrecisionPolicy. `upcast` makes parameters float32
    before they are sharded: those that are trained, or all. `cpu_offload` keeps shards, gradients and optimizer
    states on the host (see host_shards.py).
    """

    layout: Layout = NO_LAYOUT
    wrap: tuple[str, ...] = (BLOCKS,)
    reshard_after_forward: bool | int | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True
    upcast: str = "none"
    cpu_offload: bool = False

    name = "fsdp2"
    shards_dim_0 = True

    def check(self, model: ResolvedModel, step: StepSpec) -> None:
        check_on_shards(step.optimizer, "fsdp2")
        number = self.reshard_after_forward
        if isinstance(number, int) and not isinstance(number, bool):
            shards = self.layout.fsdp
            if not 1 < number < shards or shards % number:
                ranks = f"dp_shard {self.layout.dp_shard}"
                if self.layout.cp > 1:
                    ranks += f" x cp {self.layout.cp} = {shards}"
                raise InputError(
                    f"reshard_after_forward is {number}, but has to be always, never or a divisor of {ranks} "
                    f"other than 1 and {shards}."
                )

    @property
    def casts_to(self) -> str | None:
        return self.param_dtype

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        cast_up(module, self.upcast)
        return module

    def distribute(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module, which is on the device, sharded in place."""
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dtypes = {
            name: getattr(torch, dtype) if (dtype := getattr(self, name)) else None
            for name in ("param_dtype", "reduce_dtype", "output_dtype")
        }
        policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=self.cast_forward_inputs)
        options: dict[str, Any] = {"mesh": data_parallel_mesh(self.layout), "mp_policy": policy}
        options["ignored_params"] = unshardable(module)
        with _one_chunk_made():
            shard_experts(module, self.layout, options)
            for unit in units_of(module, self.wrap):
                parts = [module.get_submodule(name) for name in unit.modules]
                reshard = self._reshard_unit() if unit.reshard is None else unit.reshard
                fully_shard(parts if len(parts) > 1 else parts[0], reshard_after_forward=reshard, **options)
            fully_shard(module, reshard_after_forward=self.reshard_after_forward, **options)
        _keep_shards_as_they_are(module)
        if self.cpu_offload:
            keep_on_host(module)
        return module

    @property
    def rewrites(self) -> bool:
        return self.cpu_offload

    def rewrite(self, liveness: Liveness, graph: StepGraph) -> Liveness:
        return without_host(liveness, graph) if self.cpu_offload else liveness

    def offloaded_bytes(self, graph: StepGraph) -> int:
        return sum(host_bytes(graph).values()) if self.cpu_offload else 0

    def remarks(self, graph: StepGraph) -> tuple[str, ...]:
        if not self.cpu_offload:
            return ()
        sizes = ", ".join(f"{name} {nbytes / GIB:.2f} GiB" for name, nbytes in host_bytes(graph).items())
        said = "on the host of this rank, pinned as CPUOffloadPolicy does but for the states"
        return (f"{said}: {sizes}; the optimizer runs there",)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Without torch's warning of results that are views, as local parts of DTensors are."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
            yield

    def _reshard_unit(self) -> bool | int:
        return True if self.reshard_after_forward is None else self.reshard_after_forward


def unshardable(module: torch.nn.Module) -> set[torch.Tensor]:
    """Packed weights in integers, which stay whole on every rank: DTensors of them lose their statistics.

    Source: accelerate 1.15 utils/fsdp_utils.py (fsdp2_prepare_model, incompatible_params4bit).
    """
    return {parameter for parameter in module.parameters() if not parameter.is_floating_point()}


class _Chunks:
    """The chunks of a tensor, each made when it is asked for; those of the last ranks may be empty."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int):
        self._tensor, self._count, self._dim = tensor, count, dim

    def __getitem__(self, rank: int) -> torch.Tensor:
        size = self._tensor.shape[self._dim]
        rows = -(-size // self._count)
        begin = rank * rows
        if begin >= size > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(rows, size - begin))


@contextlib.contextmanager
def _one_chunk_made() -> Iterator[None]:
    """`fully_shard` cuts every parameter into the shards of all ranks and keeps its own: of 4,096, the others are not
    made here.
    """
    from unittest import mock

    with mock.patch("torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty", _Chunks):
        yield


def _keep_shards_as_they_are(module: torch.nn.Module) -> None:
    """Do what FSDP's lazy initialisation finds on a GPU: shards that it padded itself need no second padding.

    It recognises them by the address of their memory, which phantom tensors have not.
    """
    for part in module.modules():
        state = getattr(part, "_get_fsdp_state", lambda: None)()
        for group in getattr(state, "_fsdp_param_groups", None) or ():
            group._reset_sharded_params = True
