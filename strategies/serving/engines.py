"""What every engine has to say: its defaults, what it may take of the GPU, and what a sequence costs in its cache.

An engine is a frozen dataclass whose methods are its rules; the rules' sources stand in its file. The rules turn traced
numbers (weights, activations, the cache's layout) into a budget; they compute no total themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from metapeak.strategies.serving.formats import KV_DTYPES
from metapeak.tracer.device.overheads import Overhead
from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.gpus import Gpu
from metapeak.tracer.kv_cache import CacheLayout

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """An engine's settings, resolved: tokens of one prefill, sequences at once, tokens a block of the cache, the
    fraction of the GPU, rows of logits in the largest forward, and sentences about what was assumed.
    """

    batched_tokens: int
    max_seqs: int
    block_size: int = 1
    memory_fraction: float = 1.0
    logits_rows: int = 1
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What an engine may use and what it charges against that before the cache gets the rest.

    `limit_bytes` for everything that is charged, `charges` beside weights and activations, `charges_activations`
    whether the prefill's peak is charged, `share` the part of the rest that becomes cache, `outside` what the engine
    takes of the GPU outside the limit, `rule` the whole in words.
    """

    limit_bytes: int
    rule: str
    charges: tuple[Overhead, ...] = ()
    charges_activations: bool = True
    share: float = 1.0
    outside: tuple[Overhead, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user asked of an engine; None is the engine's default. Sizes in tokens, `version` as (0, 10, 2)."""

    max_model_len: int
    tp: int = 1
    pp: int = 1
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    memory_fraction: float | None = None
    version: tuple[int, ...] | None = None
    cuda_graphs: bool = True
    kv_dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Base of the engines: `quantizations` and `kv_dtypes` that it knows, the attention that it runs, its version here.

    `casts_float32`: whether float32 checkpoints are served in 16 bits unless told otherwise. `flash`: whether attention
    runs in kernels that never write the score matrix. `own_layers`: whether it has model classes of its own, with
    projections merged, the vocabulary padded and rotary tables computed beforehand, and prints weights as the caching
    allocator counts them (see weights.py). `samples`: whether the profile run samples. `batches`:
    whether sequences join a running batch. `reads`: settings that only some engines have and this one reads.
    """

    name: str
    quantizations: tuple[str, ...]
    kv_dtypes: tuple[str, ...] = tuple(KV_DTYPES)
    version: tuple[int, ...] = ()
    casts_float32: bool = True
    flash: bool = True
    parallel: bool = True
    needs_bf16_card: bool = True
    samples: bool = True
    own_layers: bool = False
    batches: bool = True
    reads: tuple[str, ...] = ()

    def settings(self, request: Request, gpu: Gpu) -> EngineSettings:
        raise NotImplementedError

    def budget(self, request: Request, settings: EngineSettings, gpu: Gpu) -> Budget:
        raise NotImplementedError

    def sequence_bytes(self, layout: CacheLayout, tokens: int, encoder_tokens: int, settings: EngineSettings) -> int:
        """Bytes of cache that one sequence of so many tokens takes, in whole blocks."""
        block = settings.block_size
        return layout.bytes_at(-(-tokens // block) * block, encoder_tokens)

    def sorts_logits(self, request: Request) -> bool:
        """Whether the sampler of the profile run sorts all logits."""
        return False

    def assumptions(self, request: Request, settings: EngineSettings) -> tuple[str, ...]:
        return settings.notes


def parse_version(text: str | None) -> tuple[int, ...] | None:
    """The numbers of a version. Raises InputError.

    >>> parse_version("v0.10.2"), parse_version("0.6.5.dev")
    ((0, 10, 2), (0, 6, 5))
    """
    if text is None:
        return None
    match = re.match(r"[v>=\s]*(\d+(?:\.\d+)*)", text)
    if match is None:
        raise InputError(f"Engine version '{text}' is none such as 0.10.2.")
    return tuple(int(part) for part in match[1].split("."))


def known_engines() -> dict[str, Engine]:
    from metapeak.strategies.serving.llama_cpp import LLAMA_CPP
    from metapeak.strategies.serving.sglang import SGLANG
    from metapeak.strategies.serving.tgi import TGI
    from metapeak.strategies.serving.transformers_engine import TRANSFORMERS
    from metapeak.strategies.serving.vllm import VLLM

    return {engine.name: engine for engine in (TRANSFORMERS, VLLM, SGLANG, TGI, LLAMA_CPP)}


# The names alone, for tables of options.
ENGINES = ("transformers", "vllm", "sglang", "tgi", "llama.cpp")


def find_engine(name: str) -> Engine:
    """The engine of that name. Raises UnknownName."""
    engines = known_engines()
    if name not in engines:
        raise UnknownName("engine", name, engines)
    return engines[name]


def total_of(items: Sequence[Overhead]) -> tuple[int, int, int]:
    """(least, expected, most) bytes."""
    return tuple(sum(getattr(item, name) for item in items) for name in ("low_bytes", "expected_bytes", "high_bytes"))
