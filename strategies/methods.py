"""The option `method`: what of the model is trained, and the options that belong to each method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metapeak.strategies.base import Strategy
from metapeak.strategies.frozen_base import FrozenBase
from metapeak.strategies.lora import LoRA
from metapeak.tracer.errors import InputError, UnknownName

METHODS = ("full", "lora", "qlora", "frozen-base")
# Option -> field of LoRA.
LORA_OPTIONS = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_targets": "targets",
    "lora_exclude": "exclude",
    "lora_dropout": "dropout",
    "lora_dora": "dora",
    "lora_rslora": "rslora",
    "lora_modules_to_save": "modules_to_save",
    "lora_bias": "bias",
    "lora_target_parameters": "target_parameters",
    "lora_layers": "layers",
    "adapter_dtype": "adapter_dtype",
}


def method_strategies(values: Mapping[str, Any]) -> list[Strategy]:
    """The strategies of the option `method`, in order; `values` are options by name, those not given None.

    Raises InputError for options that belong to another method, UnknownName for a method that does not exist.

    >>> method_strategies({"method": "lora", "lora_rank": 8, "lora_targets": None})[0].rank
    8
    """
    method = values["method"]
    if method not in METHODS:
        raise UnknownName("method", str(method), METHODS)
    given = {name: values[name] for name in LORA_OPTIONS if values.get(name) is not None}
    if given and method not in ("lora", "qlora"):
        raise InputError(f"{', '.join(given)} belongs to method lora, but the method is {method}. Give method lora.")
    if values.get("trainable") is not None and method != "frozen-base":
        raise InputError(f"trainable belongs to method frozen-base, but the method is {method}.")
    if method in ("lora", "qlora"):
        return [LoRA(**{LORA_OPTIONS[name]: value for name, value in given.items()})]
    if method == "frozen-base":
        return [FrozenBase(trainable=tuple(values.get("trainable") or ()))]
    return []
