"""Fully sharded data parallelism of torch, first version (FSDP1): one flat parameter a unit.

What it changes: each unit's parameters become one flat parameter, padded and cut over `dp_shard` ranks, gathered in one
all-gather and reduced in one reduce-scatter.
Where each byte comes from: torch's own FullyShardedDataParallel runs on the phantom GPU, as one rank of the world.
Not modelled: streams that delay the reuse of freed buffers by the allocator.
Sources: torch/distributed/fsdp/_flat_param.py, _runtime_utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from metapeak.strategies.base import NoOpStrategy
from metapeak.strategies.parallel.fsdp2 import matching_modules
from metapeak.strategies.parallel.layout import NO_LAYOUT, Layout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class FSDP1(NoOpStrategy):
    """`units` are patterns of module paths (None: the model's blocks); what no unit holds is the root's.

    `sharding` is FULL_SHARD or SHARD_GRAD_OP (no resharding after forward). `param_dtype`, `reduce_dtype` and
    `buffer_dtype` make the MixedPrecision. `backward_prefetch` is BACKWARD_PRE, BACKWARD_POST or None.
    """

    layout: Layout = NO_LAYOUT
    units: tuple[str, ...] | None = None
    sharding: str = "FULL_SHARD"
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    buffer_dtype: str | None = None
    use_orig_params: bool = True
    backward_prefetch: str | None = "BACKWARD_PRE"
    limit_all_gathers: bool = True

    name = "fsdp1"

    def distribute(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module wrapped in FullyShardedDataParallel."""
        import torch
        from torch.distributed import fsdp

        from metapeak.tracer.blocks import block_names
        from metapeak.tracer.phantom import DEVICE

        names = block_names(module) if self.units is None else matching_modules(module, self.units)
        units = {id(module.get_submodule(name)) for name in names}
        dtypes = {
            name: getattr(torch, value)
            for name in ("param_dtype", "reduce_dtype", "buffer_dtype")
            if (value := getattr(self, name))
        }
        return fsdp.FullyShardedDataParallel(
            module,
            sharding_strategy=fsdp.ShardingStrategy[self.sharding],
            auto_wrap_policy=fsdp.wrap.CustomPolicy(lambda part: id(part) in units),
            mixed_precision=fsdp.MixedPrecision(**dtypes) if dtypes else None,
            backward_prefetch=fsdp.BackwardPrefetch[self.backward_prefetch] if self.backward_prefetch else None,
            use_orig_params=self.use_orig_params,
            limit_all_gathers=self.limit_all_gathers,
            device_id=DEVICE,
        )
