"""Options whose value only the model, its batch, the optimizer's class or a strategy knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metapeak.strategies.optimizers import OptimizerMaker
from metapeak.tracer.simulation import Option


def strategy_options(strategies, module, given: Mapping[str, Option]) -> dict[str, Option]:
    """The given options, and values that strategies resolve where none was given."""
    options = dict(given)
    for strategy in strategies:
        for name, option in strategy.resolved(module).items():
            if name not in options or options[name].value is None:
                options[name] = option
    return options


def resolved_options(
    built, tensors, make_optimizer: OptimizerMaker | None, given: Mapping[str, Option]
) -> dict[str, Option]:
    """Options whose value only the model or the optimizer's class knows: dtype, lengths of the batch, attention."""
    resolved: dict[str, Option] = {}

    def fill(name: str, value: Any, origin: str) -> None:
        if value is not None and (name not in given or given[name].value is None):
            resolved[name] = Option(value=value, origin=origin)

    fill("weights_dtype", built.dtype, built.dtype_source)
    if built.batch is not None:
        resolved["batch_size"] = Option(value=None, origin="the function's own batch")
    config = getattr(built.module, "config", None)
    fill("attention", getattr(config, "_attn_implementation", None), "model class")
    fill("implementation", getattr(make_optimizer, "implementation", None), "as CUDA picks for the optimizer")
    for name, value in batch_sizes(tensors).items():
        fill(name, value, "default")
    return resolved


def batch_sizes(tensors: Any) -> dict[str, int]:
    """The lengths of a batch under their option names: tokens, decoder tokens, pixels a side."""
    sizes: dict[str, int] = {}
    if not isinstance(tensors, Mapping):
        return sizes
    for name, option in (("input_ids", "seq_len"), ("decoder_input_ids", "target_len"), ("pixel_values", "image_size")):
        if name in tensors:
            sizes[option] = int(tensors[name].shape[-1])
    if "labels" in tensors and "target_len" not in sizes and tensors["labels"].dim() == 2 and "input_ids" in tensors:
        labels = int(tensors["labels"].shape[-1])
        if labels != sizes["seq_len"]:
            sizes["target_len"] = labels
    return sizes
