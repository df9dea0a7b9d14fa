"""The quantisation schemes by name: what each is, who implements it, and what its options may be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from metapeak.tracer.errors import InputError, UnknownName

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
STORAGE_DTYPES = {"uint8": "uint8", **DTYPES}
GPTQ_KERNELS = ("torch", "triton-v2")
DEFAULT_GROUP_SIZE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """`method` is transformers' name of the library, `bits` those of a weight, `options` those that it reads."""

    name: str
    method: str
    bits: int
    options: tuple[str, ...] = ()


_OF_4BIT = ("double_quant", "compute_dtype", "quant_storage")
_OF_GPTQ = ("compute_dtype", "group_size", "gptq_kernel", "quant_storage")
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="nf4", method="bitsandbytes", bits=4, options=_OF_4BIT),
        Scheme(name="fp4", method="bitsandbytes", bits=4, options=_OF_4BIT),
        Scheme(name="int8", method="bitsandbytes", bits=8),
        Scheme(name="gptq4", method="gptq", bits=4, options=_OF_GPTQ),
        Scheme(name="gptq8", method="gptq", bits=8, options=_OF_GPTQ),
        Scheme(name="awq4", method="awq", bits=4, options=("group_size",)),
    )
}


def check_scheme(
    scheme: str,
    *,
    double_quant: bool = False,
    compute_dtype: str | None = None,
    quant_storage: str = "uint8",
    group_size: int = DEFAULT_GROUP_SIZE,
    gptq_kernel: str = "torch",
) -> None:
    """Raise UnknownName or InputError for options that no such scheme has.

    >>> check_scheme("nf4", double_quant=True)
    >>> check_scheme("int8", double_quant=True)
    Traceback (most recent call last):
    ...
    metapeak.tracer.errors.InputError: double_quant belongs to nf4, fp4; int8 does not read it.
    """
    if scheme not in SCHEMES:
        raise UnknownName("quantization", scheme, SCHEMES)
    given = {
        "double_quant": double_quant,
        "compute_dtype": compute_dtype is not None,
        "quant_storage": quant_storage != "uint8",
        "group_size": group_size != DEFAULT_GROUP_SIZE,
        "gptq_kernel": gptq_kernel != GPTQ_KERNELS[0],
    }
    check_read_by(scheme, [name for name, is_given in given.items() if is_given])
    if compute_dtype is not None and compute_dtype not in DTYPES:
        raise UnknownName("compute dtype", compute_dtype, DTYPES)
    if quant_storage not in STORAGE_DTYPES:
        raise UnknownName("quant storage", quant_storage, STORAGE_DTYPES)
    if group_size != -1 and (group_size < 16 or group_size % 8):
        raise InputError(
            f"group_size is {group_size}, but GPTQ and AWQ have groups of 16, 32, 64, 128, ... inputs, or -1 for one "
            "group a layer."
        )
    if gptq_kernel not in GPTQ_KERNELS:
        raise UnknownName("gptq kernel", gptq_kernel, GPTQ_KERNELS)


def check_read_by(scheme: str, names: Iterable[str]) -> None:
    """Raise InputError for an option among `names` that other schemes read and this one does not."""
    for name in names:
        readers = [other.name for other in SCHEMES.values() if name in other.options]
        if readers and scheme not in readers:
            raise InputError(f"{name} belongs to {', '.join(readers)}; {scheme} does not read it.")
