"""The quantisation schemes by name: what each is, who implements it, and what its options may be."""

from __future__ import annotations

from dataclasses import dataclass

from metapeak.tracer.errors import InputError, UnknownName

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
STORAGE_DTYPES = {"uint8": "uint8", **DTYPES}
GPTQ_KERNELS = ("torch", "triton-v2")
DEFAULT_GROUP_SIZE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """`method` is transformers' name of the library, `bits` those of a weight."""

    name: str
    method: str
    bits: int


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="nf4", method="bitsandbytes", bits=4),
        Scheme(name="fp4", method="bitsandbytes", bits=4),
        Scheme(name="int8", method="bitsandbytes", bits=8),
        Scheme(name="gptq4", method="gptq", bits=4),
        Scheme(name="gptq8", method="gptq", bits=8),
        Scheme(name="awq4", method="awq", bits=4),
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
    metapeak.tracer.errors.InputError: double_quant belongs to nf4 and fp4; int8 has no second level of statistics.
    """
    if scheme not in SCHEMES:
        raise UnknownName("quantization", scheme, SCHEMES)
    if double_quant and scheme not in ("nf4", "fp4"):
        raise InputError(f"double_quant belongs to nf4 and fp4; {scheme} has no second level of statistics.")
    if compute_dtype is not None and compute_dtype not in DTYPES:
        raise UnknownName("compute dtype", compute_dtype, DTYPES)
    if compute_dtype is not None and scheme == "int8":
        raise InputError("compute_dtype belongs to 4-bit layers; int8 computes in int8 and dequantises to float16.")
    if quant_storage not in STORAGE_DTYPES:
        raise UnknownName("quant storage", quant_storage, STORAGE_DTYPES)
    if quant_storage != "uint8" and scheme not in ("nf4", "fp4"):
        raise InputError(f"quant_storage belongs to nf4 and fp4; {scheme} stores its weights as its library does.")
    if group_size != -1 and (group_size < 16 or group_size % 8):
        raise InputError(
            f"group_size is {group_size}, but GPTQ and AWQ have groups of 16, 32, 64, 128, ... inputs, or -1 for one "
            "group a layer."
        )
    if gptq_kernel not in GPTQ_KERNELS:
        raise UnknownName("gptq kernel", gptq_kernel, GPTQ_KERNELS)
