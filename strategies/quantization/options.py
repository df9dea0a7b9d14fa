"""From options by name to the strategy: what --quantization, its companions and method qlora mean together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metapeak.strategies.quantization.schemes import check_read_by, check_scheme
from metapeak.strategies.quantization.strategy import NotQuantized, Quantization
from metapeak.tracer.errors import InputError

# Option -> field of Quantization.
QUANTIZATION_OPTIONS = {
    "double_quant": "double_quant",
    "compute_dtype": "compute_dtype",
    "quant_storage": "quant_storage",
    "group_size": "group_size",
    "gptq_kernel": "gptq_kernel",
    "skip_modules": "skip_modules",
    "kbit_prepare": "kbit_prepare",
    "kbit_cast_back": "kbit_cast_back",
}
QLORA_SCHEME = "nf4"


def quantization_strategies(values: Mapping[str, Any]) -> list[Quantization | NotQuantized]:
    """The strategy of the option `quantization`, if any; `values` are options by name, those not given None.

    Method qlora is a quantised base and adapters: nf4 with double quantisation unless the options say otherwise.
    Raises InputError where options contradict each other.

    >>> quantization_strategies({"method": "qlora"})[0].double_quant
    True
    >>> quantization_strategies({"method": "full", "quantization": "nf4"})
    Traceback (most recent call last):
    ...
    metapeak.tracer.errors.InputError: nf4 weights cannot be trained: use --method qlora.
    """
    method, scheme = values.get("method", "full"), values.get("quantization")
    given = {field: values[name] for name, field in QUANTIZATION_OPTIONS.items() if values.get(name) is not None}
    if scheme == "none" and method == "qlora":
        raise InputError("Method qlora is LoRA on a quantised base; with quantization none give --method lora.")
    if scheme in (None, "none") and method != "qlora":
        if given:
            raise InputError(
                f"{', '.join(given)} belongs to a quantised base, but there is none. Give --quantization or --method "
                "qlora."
            )
        return [NotQuantized()] if scheme == "none" else []
    if scheme is not None:
        check_scheme(scheme)
    if method == "full":
        raise InputError(f"{scheme} weights cannot be trained: use --method qlora.")
    origin, named = "option" if scheme is not None else "method qlora", tuple(given)
    scheme = scheme or QLORA_SCHEME
    check_read_by(scheme, [name for name in named if given[name] is not False])
    if method == "qlora" and scheme in ("nf4", "fp4"):
        given.setdefault("double_quant", True)
    return [Quantization(scheme=scheme, origin=origin, named=named, **given)]
