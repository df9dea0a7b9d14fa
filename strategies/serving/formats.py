"""Formats of weights and of keys and values: bytes an element, who reads them, and which GPU they need.

Sources: ggml-quants (block layouts; gguf 0.19 constants.GGML_QUANT_SIZES) for GGUF types; transformers 5.24
quantizers/ for nf4, fp4, int8, gptq and awq, which are built as real layers (strategies/quantization); float8: one byte
a weight and a float32 scale an output row (llm-compressor FP8_DYNAMIC), or a tensor (vLLM's online fp8).
"""

from __future__ import annotations

from dataclasses import dataclass

from metapeak.strategies.quantization.schemes import SCHEMES
from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.gpus import Gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """A format of `block` elements in `block_bytes`, with `row_bytes` more a row of a matrix (scales of rows)."""

    name: str
    block: int
    block_bytes: int
    row_bytes: int = 0

    def bytes_of(self, rows: int, numel: int) -> int:
        """Bytes of a matrix of so many rows and elements; every row is made of whole blocks.

        >>> FORMATS["q8_0"].bytes_of(4096, 4096 * 4096)
        17825792
        """
        columns = numel // rows
        return rows * (-(-columns // self.block) * self.block_bytes + self.row_bytes)

    @property
    def bits(self) -> float:
        return 8 * self.block_bytes / self.block


# GGUF types: elements a block, bytes a block.
_GGUF = {
    "q8_0": (32, 34), "q6_k": (256, 210), "q5_k": (256, 176), "q5_0": (32, 22), "q5_1": (32, 24), "q4_k": (256, 144),
    "q4_0": (32, 18), "q4_1": (32, 20), "iq4_nl": (32, 18), "q3_k": (256, 110), "q2_k": (256, 84),
}  # fmt: skip
FORMATS = {name: BlockFormat(name=name, block=block, block_bytes=size) for name, (block, size) in _GGUF.items()} | {
    "fp8": BlockFormat(name="fp8", block=1, block_bytes=1, row_bytes=4)
}

# What keys and values may be stored as: bytes an element.
KV_DTYPES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
FP8_CAPABILITY = (8, 9)
BF16_CAPABILITY = (8, 0)


def check_quantization(name: str | None, known: tuple[str, ...], engine: str, gpu: Gpu | None) -> None:
    """Raise UnknownName or InputError for a format that nobody, this engine or this GPU has."""
    if name is None:
        return
    if name not in SCHEMES and name not in FORMATS:
        raise UnknownName("quantization", name, [*SCHEMES, *FORMATS])
    if name not in known:
        raise InputError(
            f"{engine} loads no {name} weights; it loads {', '.join(known)}. Give one of those, or another --engine."
        )
    if name == "fp8":
        check_fp8(gpu, "fp8 weights are computed in fp8")


def check_fp8(gpu: Gpu | None, what: str) -> None:
    """Raise InputError on a GPU whose tensor cores have no fp8."""
    if gpu is not None and not gpu.supports_fp8:
        need = f"compute capability >= {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]}"
        found = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else gpu.architecture
        raise InputError(
            f"{what}, which needs {need} on NVIDIA cards (MI300 or later on AMD's); {gpu.id} is {found}. "
            "Leave fp8 out, or take a card that has it: l4, l40s, h100, rtx-4090."
        )
