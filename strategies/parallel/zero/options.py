"""The options of DeepSpeed: what it makes of a precision, and what is refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from metapeak.strategies.parallel.layout import Layout
from metapeak.strategies.parallel.zero.strategy import AUTO, AUTO_SIZES, ZERO_DEFAULTS, DeepSpeed
from metapeak.tracer.errors import InputError
from metapeak.tracer.simulation import Option

TRUTHS = ("true", "false")
OFFLOAD_DEVICES = ("none", "cpu")
ZERO_OPTIONS = (*ZERO_DEFAULTS, "offload_optimizer", "offload_param")
_LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ADAM = ("adam", "adamw")


def elements_of(text: str) -> int | str:
    """A number of elements, also as 5e8, or "auto". Raises InputError.

    >>> elements_of("5e8"), elements_of("auto")
    (500000000, 'auto')
    """
    if text == AUTO:
        return AUTO
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if number < 0 or number != int(number):
        raise InputError(f"'{text}' is no number of elements such as 200000000 or 5e8, nor auto.")
    return int(number)


def check_zero_options(options: Mapping[str, Option]) -> None:
    """Raise InputError for DeepSpeed's options with another engine or stage."""
    engine, stage = options["engine"].value, options["zero_stage"].value or 0
    given = [name for name in ZERO_OPTIONS if options[name].value not in (None, "none")]
    if given and engine != "deepspeed":
        raise InputError(f"{', '.join(given)} belongs to engine deepspeed, not to {engine}.")
    for name in given:
        if options[name].value == AUTO and name not in AUTO_SIZES:
            raise InputError(f"{name} auto: the Hugging Face Trainer has no rule for it. Give a number of elements.")
        if name.startswith("stage3_") and stage != 3 and not options[name].origin.startswith("preset"):
            raise InputError(f"{name} belongs to zero_stage 3, not to {stage}.")
    if options["offload_param"].value == "cpu" and stage != 3:
        raise InputError(f"offload_param: stage {stage} has no partitions of the parameters; zero_stage 3 has.")
    if options["offload_optimizer"].value == "cpu" and stage == 0:
        raise InputError("offload_optimizer: stage 0 has no partitions; zero_stage 1, 2 or 3 has.")


def with_own_precision(options: Mapping[str, Option]) -> dict[str, Option]:
    """`options` with what DeepSpeed and Megatron make of a mixed precision: the parameters are cast, without a region.

    Sources: deepspeed 0.19.8 runtime/engine.py, _configure_distributed_model; Megatron-LM core/transformer/module.py,
    Float16Module. Raises InputError for options of a loop that the engine replaces.
    """
    options, engine = dict(options), options["engine"].value
    for name, why in (
        ("master_weights", "its partitions are float32 copies of the weights already"),
        ("state_dtype", "its states have the dtype of the float32 partitions"),
        (
            "sync_each_batch",
            "it decides that itself (ZeRO 2 and 3 after every micro-batch, others after the last)",
        ),
    ):
        if options[name].value and not options[name].origin.startswith("preset"):
            raise InputError(f"{name} with engine {engine}: {why}. Leave it out.")
    if options["implementation"].value == "in-backward":
        raise InputError(f"implementation in-backward with engine {engine}: the engine steps after backward.")
    autocast = options["autocast"]
    if autocast.value is not None:
        origin = f"{autocast.origin}; the engine casts the parameters, there is no autocast"
        if options["param_dtype"].value is None:
            options["param_dtype"] = Option(value=autocast.value, origin=origin)
        options["autocast"] = Option(value=None, origin=origin)
    return options


def is_installed() -> bool:
    """Whether DeepSpeed can be imported."""
    return importlib.util.find_spec("deepspeed") is not None


def deepspeed_strategy(layout: Layout, values: Mapping[str, Any]) -> DeepSpeed:
    """The strategy of the options. Raises InputError where DeepSpeed is not installed."""
    if not is_installed():
        raise InputError(
            "engine deepspeed runs DeepSpeed itself, which is not installed: DS_BUILD_OPS=0 pip install "
            "'deepspeed>=0.19.8,<0.20'. PyTorch's own sharding is --engine fsdp2 with --dp-shard."
        )
    zero = {name: values[name] for name in ZERO_DEFAULTS if values[name] is not None}
    zero = {name: value == "true" if value in TRUTHS else value for name, value in zero.items()}
    offloads = {name: "cpu" if values[name] == "cpu" else None for name in ("offload_optimizer", "offload_param")}
    return DeepSpeed(
        layout=layout,
        stage=values["zero_stage"] or 0,
        zero=tuple(zero.items()),
        param_dtype=_LONG.get(values["param_dtype"]),
        grad_accum_dtype=_LONG.get(values["grad_accum_dtype"]),
        max_grad_norm=values["max_grad_norm"],
        fused_adam=values["optimizer"] in _ADAM and values["implementation"] is None and not values["optimizer_args"],
        **offloads,
    )
