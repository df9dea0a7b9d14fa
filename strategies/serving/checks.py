"""What cannot be served: settings out of range, formats that an engine or a card lacks, settings that nothing reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from metapeak.strategies.serving.engines import Engine, known_engines, parse_version
from metapeak.strategies.serving.formats import KV_DTYPES, check_fp8, check_quantization
from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.gpus import Gpu

if TYPE_CHECKING:
    from metapeak.strategies.serving.serve import ServingSpec

# Settings that only some engines read (Engine.reads): their flag, their default, and what an engine has instead.
_BATCHED = {"transformers": ": a batch has as many sequences as --concurrency", "llama.cpp": ": -np is --concurrency"}
_WHOLE = {"transformers": ": it takes what it needs", "llama.cpp": ": it takes what it needs"}
_GRAPHS = {"sglang": ": what it sets aside for graphs does not depend on it here"}
_READ_BY_SOME = {
    "engine_version": ("--engine-version", None, {}),
    "max_num_seqs": ("--max-num-seqs", None, _BATCHED),
    "block_size": ("--block-size", None, {}),
    "memory_fraction": ("--gpu-memory-utilization", None, _WHOLE),
    "cuda_graphs": ("--enforce-eager", True, _GRAPHS),
}
_READ_BY_SCHEMES = {"double_quant": ("nf4", "fp4"), "group_size": ("gptq4", "gptq8", "awq4")}


def check_spec(spec: ServingSpec, engine: Engine, gpu: Gpu) -> None:
    """Raise InputError or UnknownName for what this engine or GPU cannot do, before anything is imported."""
    counts = (
        "tp",
        "pp",
        "max_model_len",
        "context",
        "concurrency",
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
    )
    for name in (*counts, "encoder_tokens"):
        value = getattr(spec, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 24):
            raise InputError(f"{name} is {value!r}, but has to be a whole number from 1 to {1 << 24}.")
    if spec.memory_fraction is not None and not 0 < spec.memory_fraction <= 1:
        raise InputError(f"memory fraction is {spec.memory_fraction}, but has to be above 0 and at most 1.")
    parse_version(spec.engine_version)
    _check_read(spec, engine)
    check_quantization(spec.quantization, engine.quantizations, engine.name, gpu)
    if spec.kv_dtype is not None and spec.kv_dtype not in KV_DTYPES:
        raise UnknownName("dtype of keys and values", spec.kv_dtype, KV_DTYPES)
    if spec.kv_dtype is not None and spec.kv_dtype not in engine.kv_dtypes:
        raise InputError(
            f"{engine.name} keeps no keys and values in {spec.kv_dtype}; it has {', '.join(engine.kv_dtypes)}."
        )
    if spec.kv_dtype == "fp8":
        check_fp8(gpu, "keys and values in fp8 are read by fp8 kernels")
    if not engine.parallel and spec.tp * spec.pp > 1:
        raise InputError(
            f"{engine.name}: tp {spec.tp} and pp {spec.pp} are not modelled; it splits by layers and rows."
        )


def _check_read(spec: ServingSpec, engine: Engine) -> None:
    """Raise InputError for a setting that this engine, or this format of weights, would leave unread."""
    for name, (flag, default, hint) in _READ_BY_SOME.items():
        if getattr(spec, name) == default or name in engine.reads:
            continue
        others = ", ".join(other.name for other in known_engines().values() if name in other.reads)
        raise InputError(
            f"{engine.name} reads no {flag}{hint.get(engine.name, '')}. It is read by {others}: leave it out."
        )
    for name, schemes in _READ_BY_SCHEMES.items():
        if getattr(spec, name) and spec.quantization not in schemes:
            found = spec.quantization or "none is given"
            raise InputError(f"{name} belongs to quantization {', '.join(schemes)}; found: {found}.")
    if engine.name == "tgi" and spec.pp > 1:
        raise InputError(f"tgi: pp {spec.pp}, but it shards by tensors only (--num-shard). Give --tp.")


def max_model_len_of(asked: int | None, longest: tuple[int | None, str], name: str) -> int:
    """The longest sequence served: what was asked, at most the model's own. Raises InputError."""
    most, where = longest
    if asked is None:
        if most is None:
            raise InputError(f"{name} names no longest sequence. Give --max-model-len.")
        return most
    if most is not None and asked > most:
        raise InputError(
            f"Asked for max_model_len {asked}, but {name} has {most} positions ({where}). Give at most {most}, or a "
            "config with longer ones (rope scaling)."
        )
    return asked


def longest_of(module: Any) -> tuple[int | None, str]:
    """(most positions of the model, None where it names none; where that stands)."""
    from metapeak.tracer.sequences import most_positions, trained_length

    most = most_positions(module)
    if most is not None:
        return most, "its table of positions"
    return trained_length(module.config), "max_position_embeddings of the config"
