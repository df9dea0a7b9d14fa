"""Checkpoints that come quantised: what their `quantization_config` means for a training step.

Four cases:
- bitsandbytes, GPTQ and AWQ: the base is loaded packed; a strategy builds the same layers.
- MXFP4: transformers trains it only dequantised (Mxfp4Config(dequantize=True)), so plain weights are what is trained.
- float8 and the others: built with plain weights, and said; their packed weights are not counted.
- the config asks for what no layer here is (2 or 3 bits, GEMV packing): the same.

Sources: transformers 5.24 utils/quantization_config.py; quantizers/quantizer_*.py (`is_trainable`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from metapeak.strategies.quantization.schemes import SCHEMES, STORAGE_DTYPES
from metapeak.strategies.quantization.strategy import Quantization
from metapeak.tracer.errors import InputError

if TYPE_CHECKING:
    from metapeak.strategies.base import Strategy
    from metapeak.tracer.models import ResolvedModel

_DTYPE_NAMES = {full: short for short, full in STORAGE_DTYPES.items()}
_DEQUANTISED = {"mxfp4": "Mxfp4Config(dequantize=True)"}


def checkpoint_quantization(config: Mapping[str, Any] | None) -> Quantization | None:
    """The strategy that a config's `quantization_config` means; None where it has none, or one without layers here.

    >>> checkpoint_quantization({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}).scheme
    'gptq4'
    """
    there = (config or {}).get("quantization_config")
    if not isinstance(there, Mapping):
        return None
    method = there.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in there else None)
    reader = {"bitsandbytes": _bitsandbytes, "gptq": _gptq, "awq": _awq}.get(method)
    return reader(there) if reader else None


def with_checkpoint_quantization(
    resolved: ResolvedModel, strategies: Sequence[Strategy]
) -> tuple[list[Strategy], tuple[str, ...]]:
    """(strategies with the checkpoint's own quantisation first, what to say of a checkpoint that is built plain).

    The scheme that method qlora takes by default gives way to the checkpoint's; what was asked for by name is left to
    `Quantization.check`.
    """
    own = checkpoint_quantization(resolved.config_dict)
    if own is None:
        note = _plain_note(resolved)
        return list(strategies), (note,) if note else ()
    asked = [strategy for strategy in strategies if isinstance(strategy, Quantization)]
    if any(strategy.scheme != own.scheme and strategy.origin == "option" for strategy in asked):
        return list(strategies), ()
    if asked:
        _refuse_other_options(resolved.id, asked[0], own)
        kept = ["kbit_prepare", "kbit_cast_back", "gptq_kernel"]
        if own.method == "gptq":  # how its integers are held, no matter of the file
            kept.append("quant_storage")
        own = dataclasses.replace(own, **{name: getattr(asked[0], name) for name in kept})
        return [own if strategy is asked[0] else strategy for strategy in strategies], ()
    return [own, *strategies], ()


def _refuse_other_options(model: str, asked: Quantization, own: Quantization) -> None:
    """Refuse what the checkpoint decides otherwise. Double quantisation gives way: presets and qlora fill it in."""
    for field in dataclasses.fields(Quantization):
        held = field.name == "quant_storage" and own.method == "gptq"
        if field.name in ("compute_dtype", "quant_storage", "group_size", "skip_modules") and not held:
            value, there = getattr(asked, field.name), getattr(own, field.name)
            if value != there and (field.name in asked.named or value != field.default):
                raise InputError(f"{model} is quantised already, with {field.name} {there}; {value} was asked for.")


def _bitsandbytes(there: Mapping[str, Any]) -> Quantization:
    skip = there.get("llm_int8_skip_modules")
    options: dict[str, Any] = {"skip_modules": None if skip is None else tuple(skip), "origin": "checkpoint"}
    if there.get("load_in_8bit") or there.get("_load_in_8bit"):
        return Quantization(scheme="int8", **options)
    return Quantization(
        scheme=there.get("bnb_4bit_quant_type", "fp4"),
        double_quant=bool(there.get("bnb_4bit_use_double_quant")),
        compute_dtype=_DTYPE_NAMES.get(there.get("bnb_4bit_compute_dtype", "float32"), "fp32"),
        quant_storage=_DTYPE_NAMES.get(there.get("bnb_4bit_quant_storage", "uint8"), "uint8"),
        **options,
    )


def _gptq(there: Mapping[str, Any]) -> Quantization | None:
    scheme = f"gptq{there.get('bits')}"
    if scheme not in SCHEMES:
        return None
    return Quantization(scheme=scheme, group_size=there.get("group_size", 128), origin="checkpoint")


def _awq(there: Mapping[str, Any]) -> Quantization | None:
    scheme, version = f"awq{there.get('bits', there.get('w_bit'))}", str(there.get("version", "gemm")).lower()
    if scheme not in SCHEMES or version != "gemm":
        return None
    skip = there.get("modules_to_not_convert")
    return Quantization(
        scheme=scheme,
        group_size=there.get("group_size", there.get("q_group_size", 128)),
        skip_modules=None if skip is None else tuple(skip),
        origin="checkpoint",
    )


def _plain_note(resolved: ResolvedModel) -> str | None:
    there = (resolved.config_dict or {}).get("quantization_config")
    if not there:
        return None
    method = there.get("quant_method", "unnamed") if isinstance(there, Mapping) else "unnamed"
    if method in _DEQUANTISED:
        return f"the checkpoint is quantised ({method}) and dequantised for training: {_DEQUANTISED[method]}"
    return (
        f"the checkpoint of {resolved.id} is quantised ({method}); the model is built with plain weights, so its "
        "packed weights and scales are not counted"
    )
