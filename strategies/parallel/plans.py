"""Which style of transformers cuts which module or parameter, resolved by transformers for a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from metapeak.strategies.parallel.layout import Layout

if TYPE_CHECKING:
    import torch


def parallel_plans(
    module: torch.nn.Module, layout: Layout, given: Mapping[str, str] | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """(tensor parallel, expert parallel) styles by concrete path of a module or parameter; the module stays as it is.

    `given` has rules that go before the model's own. Raises ValueError with transformers' reason.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    # transformers' axis of data is that of FSDP here, context parallelism included.
    config = DistributedConfig(
        tp_size=layout.tp, fsdp_size=layout.fsdp, ep_size=layout.ep, tp_plan=dict(given) if given else None
    )
    before, there = dict(module.tp_plan), paths(module)
    # Rules for modules that the model has not are left out, because transformers warns of them.
    module._tp_plan = {name: style for name, style in before.items() if name in there}
    try:
        tensor, expert, _ = module._resolve_parallel_plans(config)
    finally:
        module._tp_plan = before
    return tensor, expert


def paths(module: torch.nn.Module) -> dict[str, str | None]:
    """Class by path of a module that has parameters of its own, `*` for layer numbers; None for other paths."""
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard as generic

    found: dict[str, str | None] = {}
    for name, part in module.named_modules():
        found[generic(name)] = type(part).__name__ if part._parameters else None
    return {**found, **{generic(name): None for name, _ in module.named_parameters()}}
