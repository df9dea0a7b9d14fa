"""Tensor parallelism by transformers itself: the model's own plan, DTensor parameters, real collectives.

What it changes: linear layers, embeddings and experts that the plan names are cut over `tp` ranks; what it does not
name stays whole on every rank, and so do activations between layers.
Where each byte comes from: transformers' `apply_tensor_parallelism` runs on the phantom GPU, as one rank of the world.
Not modelled: plans outside transformers' styles.
Sources: transformers/distributed/tensor_parallel.py, `base_model_tp_plan` of each config class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metapeak.strategies.base import NoOpStrategy
from metapeak.strategies.parallel.layout import NO_LAYOUT, Layout
from metapeak.strategies.parallel.meshes import layout_mesh
from metapeak.tracer.errors import InputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class TensorParallel(NoOpStrategy):
    """`plan` maps module paths (`*` for layer numbers) to styles of transformers; None takes the model's own."""

    layout: Layout = NO_LAYOUT
    plan: Mapping[str, str] | None = None

    name = "tensor parallel"

    def distribute(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module, which is on the device, cut in place. Raises InputError for no plan and for a wrong one."""
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        from metapeak.strategies.parallel.stages import Passed

        if self.layout.tp == 1:
            return module
        if not hasattr(module, "_resolve_parallel_plans"):
            raise InputError(
                f"tp {self.layout.tp}: {type(module).__name__} is no model of transformers with a tp plan."
            )
        self._check_heads(module.config.get_text_config())
        config = DistributedConfig(tp_size=self.layout.tp, tp_plan=dict(self.plan) if self.plan else None)
        try:
            plan, _, _ = module._resolve_parallel_plans(config)
        except ValueError as error:
            raise InputError(f"tp {self.layout.tp}: {error}") from error
        elsewhere = {name for name, part in module.named_modules() if isinstance(part, Passed)}
        plan = {name: style for name, style in plan.items() if name not in elsewhere}
        tied = _separate_tied(module)
        apply_tensor_parallelism(module, layout_mesh(self.layout)["tp"], plan)
        for owner, name, source_owner, source_name in tied:
            owner._parameters[name] = source_owner._parameters[source_name]
        return module

    def _check_heads(self, config) -> None:
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, name, None)
            if isinstance(heads, int) and heads % self.layout.tp:
                raise InputError(
                    f"{name} {heads} / tp {self.layout.tp} = {heads / self.layout.tp:.2f} is no whole number of heads. "
                    f"Degrees that divide it: {', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}."
                )


def _separate_tied(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Module, str]]:
    """Give every further owner of a tied parameter one of its own, as it is before a checkpoint is loaded.

    Returns (owner, name, first owner, its name) to tie them again.
    """
    import torch

    first: dict[int, tuple[torch.nn.Module, str]] = {}
    separated = []
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in first:
                first[id(parameter)] = (part, name)
            else:
                separated.append((part, name, *first[id(parameter)]))
                part._parameters[name] = torch.nn.Parameter(
                    torch.empty_like(parameter), requires_grad=parameter.requires_grad
                )
    return separated


def sharded_and_whole_apart(make: Callable[[list], Any]) -> Callable[[list], Any]:
    """`make`, with an optimizer of their own for the parameters that are whole beside others that are DTensors.

    foreach and fused kernels take lists of one kind ("got mixed torch.Tensor and DTensor").
    """

    def make_apart(parameters: list) -> Any:
        from torch.distributed.tensor import DTensor

        from metapeak.strategies.optimizers.several import SeveralOptimizers

        sharded, whole = [], []
        for given in parameters:
            (sharded if isinstance(given[1] if isinstance(given, tuple) else given, DTensor) else whole).append(given)
        if not sharded or not whole:
            return make(parameters)
        return SeveralOptimizers([make(sharded), make(whole)])

    return make_apart
