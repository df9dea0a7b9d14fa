"""Fully sharded data parallelism of torch (FSDP2, `fully_shard`): ZeRO 3, or 2 without resharding.

What it changes: parameters, gradients and optimizer states are sharded over `dp_shard` ranks and gathered unit by unit;
with `dp_replicate` the shards are replicated (HSDP).
Where each byte comes from: torch's own `fully_shard` runs on the phantom GPU, as one rank of the world.
Not modelled: streams that delay the reuse of freed buffers by the allocator.
Sources: torch/distributed/fsdp/_fully_shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metapeak.strategies.base import NoOpStrategy
from metapeak.strategies.parallel.layout import NO_LAYOUT, Layout
from metapeak.tracer.errors import InputError

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.graph import StepGraph
    from metapeak.tracer.models import ResolvedModel
    from metapeak.tracer.spec import StepSpec


@dataclass(frozen=True, kw_only=True)
class FSDP2(NoOpStrategy):
    """`fully_shard` on every unit and then on the whole model.

    `units` are patterns of module paths (None: the model's blocks); what no unit holds is sharded by the root.
    `reshard_after_forward` is that of `fully_shard`: None (all units but the root), True, False or a number of ranks.
    `param_dtype`, `reduce_dtype` and `output_dtype` make the MixedPrecisionPolicy.
    """

    layout: Layout = NO_LAYOUT
    units: tuple[str, ...] | None = None
    reshard_after_forward: bool | int | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True

    name = "fsdp2"

    def check(self, model: ResolvedModel, step: StepSpec) -> None:
        number = self.reshard_after_forward
        if isinstance(number, int) and not isinstance(number, bool):
            shards = self.layout.dp_shard
            if not 1 < number < shards or shards % number:
                raise InputError(
                    f"reshard_after_forward is {number}, but has to be true, false or a divisor of dp_shard {shards} "
                    f"other than 1 and {shards}."
                )

    def distribute(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module, which is on the device, sharded in place."""
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from metapeak.tracer.distributed import mesh_of

        axes = {"dp_replicate": self.layout.dp_replicate, "dp_shard": self.layout.dp_shard}
        mesh = mesh_of({axis: degree for axis, degree in axes.items() if axis == "dp_shard" or degree > 1})
        dtype = {name: getattr(torch, name) if name else None for name in (self.param_dtype, self.reduce_dtype)}
        policy = MixedPrecisionPolicy(
            param_dtype=dtype[self.param_dtype],
            reduce_dtype=dtype[self.reduce_dtype],
            output_dtype=getattr(torch, self.output_dtype) if self.output_dtype else None,
            cast_forward_inputs=self.cast_forward_inputs,
        )
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        for unit in self._units(module):
            fully_shard(unit, reshard_after_forward=self._reshard_unit(), **options)
        fully_shard(module, reshard_after_forward=self.reshard_after_forward, **options)
        _keep_shards_as_they_are(module)
        return module

    def _reshard_unit(self) -> bool | int:
        return True if self.reshard_after_forward is None else self.reshard_after_forward

    def _units(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        from metapeak.tracer.blocks import block_names

        names = block_names(module) if self.units is None else matching_modules(module, self.units)
        for name in names:
            yield module.get_submodule(name)

    def assumptions(self) -> tuple[str, ...]:
        return ()

    def remarks(self, graph: StepGraph) -> tuple[str, ...]:
        return ()


def matching_modules(module: torch.nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Paths of the modules that a pattern matches (shell wildcards, on the path or the class name), inner ones first.

    Raises InputError for a pattern that matches nothing, with the classes that there are.
    """
    from fnmatch import fnmatchcase

    found: set[str] = set()
    for pattern in patterns:
        matches = {
            name
            for name, part in module.named_modules()
            if name and (fnmatchcase(name, pattern) or fnmatchcase(type(part).__name__, pattern))
        }
        if not matches:
            classes = sorted({type(part).__name__ for _, part in module.named_modules()})
            raise InputError(f"No module matches {pattern!r}. Classes in this model: {', '.join(classes)}.")
        found |= matches
    return sorted(found, key=lambda name: (-name.count("."), name))


def _keep_shards_as_they_are(module: torch.nn.Module) -> None:
    """Do what FSDP's lazy initialisation finds on a GPU: shards that it padded itself need no second padding.

    It recognises them by the address of their memory, which phantom tensors have not.
    """
    for part in module.modules():
        state = getattr(part, "_get_fsdp_state", lambda: None)()
        for group in getattr(state, "_fsdp_param_groups", None) or ():
            group._reset_sharded_params = True
