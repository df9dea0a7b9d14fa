"""Fully sharded data parallelism of torch, first version (FSDP1): one flat parameter a unit.

What it changes: each unit's parameters become one flat parameter, padded and cut over `dp_shard` ranks, gathered in one
all-gather and reduced in one reduce-scatter.
Where each byte comes from: torch's own FullyShardedDataParallel runs on the phantom GPU, as one rank of the world.
Not modelled: memory that another stream still uses when it is freed (record_stream) can be used again at once here.
Sources: torch/distributed/fsdp/_flat_param.py, _runtime_utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from metapeak.strategies.base import NoOpStrategy
from metapeak.strategies.parallel.layout import NO_LAYOUT, Layout
from metapeak.strategies.parallel.meshes import data_parallel_mesh
from metapeak.strategies.parallel.units import BLOCKS, cast_up, trained_leaves, units_of
from metapeak.tracer.errors import InputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class FSDP1(NoOpStrategy):
    """`wrap` names the units (see units.py); what no unit holds is the root's.

    `sharding` is FULL_SHARD or SHARD_GRAD_OP (no resharding after forward). `param_dtype`, `reduce_dtype` and
    `buffer_dtype` make the MixedPrecision. `backward_prefetch` is BACKWARD_PRE, BACKWARD_POST or None.
    `trained_units`: trained modules beside frozen ones are units of their own, as PEFT's policy for the Hugging Face
    Trainer wraps. `checkpoint_around_units`: checkpoints go around the units, not inside (see checkpoints.py).
    """

    layout: Layout = NO_LAYOUT
    wrap: tuple[str, ...] = (BLOCKS,)
    sharding: str = "FULL_SHARD"
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    buffer_dtype: str | None = None
    use_orig_params: bool = True
    backward_prefetch: str | None = "BACKWARD_PRE"
    limit_all_gathers: bool = True
    upcast: str = "none"
    trained_units: bool = True
    checkpoint_around_units: bool = False

    name = "fsdp1"

    @property
    def casts_to(self) -> str | None:
        return self.param_dtype

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        cast_up(module, self.upcast)
        return module

    def notes(self, module: torch.nn.Module) -> tuple[str, ...]:
        leaves = trained_leaves(module)
        if not leaves:
            return ()
        if not self.trained_units:
            return (
                "units hold frozen and trained parameters together (use_orig_params): their gradients are as large as "
                "the whole unit's shards, frozen ones in them as zeros",
            )
        return (
            f"{len(leaves)} trained modules are units of their own beside frozen ones, as PEFT's FSDP policy wraps",
        )

    def distribute(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module wrapped in FullyShardedDataParallel."""
        import torch
        from torch.distributed import fsdp

        from metapeak.tracer.phantom import DEVICE

        _check_flattening(module)
        names = {name for unit in units_of(module, self.wrap) for name in unit.modules}
        if self.trained_units:
            names |= {*trained_leaves(module)}
        units = {id(module.get_submodule(name)) for name in names}
        dtypes = {
            name: getattr(torch, value)
            for name in ("param_dtype", "reduce_dtype", "buffer_dtype")
            if (value := getattr(self, name))
        }
        return fsdp.FullyShardedDataParallel(
            module,
            sharding_strategy=fsdp.ShardingStrategy[self._sharding()],
            device_mesh=data_parallel_mesh(self.layout),
            auto_wrap_policy=fsdp.wrap.CustomPolicy(lambda part: id(part) in units),
            mixed_precision=fsdp.MixedPrecision(**dtypes) if dtypes else None,
            backward_prefetch=fsdp.BackwardPrefetch[self.backward_prefetch] if self.backward_prefetch else None,
            use_orig_params=self.use_orig_params,
            limit_all_gathers=self.limit_all_gathers,
            device_id=DEVICE,
        )

    def _sharding(self) -> str:
        if self.layout.dp_replicate == 1:
            return self.sharding
        return "HYBRID_SHARD" if self.sharding == "FULL_SHARD" else "_HYBRID_SHARD_ZERO2"


def _check_flattening(module: torch.nn.Module) -> None:
    """Raise InputError for parameters in integers, which flat parameters cannot hold."""
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            raise InputError(
                f"engine fsdp1: {name} is {str(parameter.dtype).removeprefix('torch.')}, and flat parameters hold "
                "floating point only. Pack 4-bit weights into another dtype (--quant-storage bf16), or use engine "
                "fsdp2, which leaves them whole on every rank."
            )
