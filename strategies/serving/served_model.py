"""The module that an engine serves: in the dtype and with the attention that it takes, its weights packed.

What it changes: the dtype of float32 checkpoints, the attention implementation, linear layers that come or are asked
for packed.
Where each byte comes from: the quantisation strategies of training build the same layers; float8 and GGUF matrices are
counted by their blocks (weights.py).
Not modelled: quantised checkpoints of other kinds (int4 of compressed-tensors, MXFP4): counted plain, and said.
Sources: vllm config/model.py (_resolve_auto_dtype, _check_bf16_support); transformers quantizers/.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from metapeak.strategies.attention import attention_of
from metapeak.strategies.quantization.from_config import checkpoint_quantization
from metapeak.strategies.quantization.schemes import SCHEMES
from metapeak.strategies.quantization.strategy import DEFAULT_GROUP_SIZE, Quantization
from metapeak.strategies.serving.engines import Engine
from metapeak.strategies.serving.formats import BF16_CAPABILITY, check_quantization
from metapeak.tracer.errors import InputError
from metapeak.tracer.gpus import Gpu
from metapeak.tracer.spec import ModelSpec

SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def build_served(resolved: Any, model: ModelSpec, engine: Engine, gpu: Gpu) -> tuple[Any, list[str]]:
    """(the model on meta in the dtype that the engine serves, what was decided)."""
    from metapeak.strategies.prepared import compute_capability_of
    from metapeak.tracer.flash_attention import flash_attention_2_available
    from metapeak.tracer.models import build

    notes: list[str] = []
    dtype = model.dtype
    with flash_attention_2_available():
        built = build(resolved, dtype=dtype)
        bf16 = gpu.supports_bf16 and compute_capability_of(gpu) >= BF16_CAPABILITY
        if dtype is None and built.dtype == "float32" and engine.casts_float32:
            dtype = "bfloat16" if bf16 else "float16"
            notes.append(
                f"the checkpoint is float32; {engine.name} serves it in {SHORT_DTYPES[dtype]} (--weights-dtype fp32)"
            )
            built = build(resolved, dtype=dtype)
        if built.dtype == "bfloat16" and not bf16 and engine.needs_bf16_card:
            raise InputError(
                f"{engine.name} serves bfloat16 on compute capability >= 8.0 only; {gpu.id} has none. "
                "Give --weights-dtype fp16."
            )
        if engine.flash and built.dtype in ("float16", "bfloat16"):
            flash = _with_flash(built.module, lambda name: build(resolved, dtype=dtype or built.dtype, attention=name))
            built = flash or built
            if flash is None and built.module.config._attn_implementation == "eager":
                notes.append(
                    f"{type(built.module).__name__} runs no flash attention 2 in transformers: its prefill is traced "
                    f"with the score matrix, which {engine.name} does not write, so it is an upper bound"
                )
    return built, notes


def _with_flash(module: Any, rebuild: Callable[[str], Any]) -> Any:
    """The model rebuilt with flash attention 2; None where transformers' class cannot run it (it may pick another
    kernel instead, or have an older attention class whose imports need the package).
    """
    implementation, _ = attention_of("flash2", (8, 0))
    names = vars(sys.modules[type(module).__module__])
    imports_it = any(name.endswith("FlashAttention2") for name in names) and "_flash_attention_forward" not in names
    if not getattr(module, "_supports_flash_attn", False) or imports_it:
        return None
    built = rebuild(implementation)
    return built if built.module.config._attn_implementation == implementation else None


def quantise(module: Any, resolved: Any, spec: Any, engine: Engine, gpu: Gpu) -> tuple[Any, str | None, list[str]]:
    """(module with its packed layers, the format of its weights, notes): what was asked, else the checkpoint's own."""
    own = checkpoint_quantization(resolved.config_dict)
    method = ((resolved.config_dict or {}).get("quantization_config") or {}).get("quant_method")
    if spec.quantization in SCHEMES:
        strategy = Quantization(
            scheme=spec.quantization, double_quant=spec.double_quant, group_size=spec.group_size or DEFAULT_GROUP_SIZE
        )
        strategy.check(resolved, None)
        return strategy.prepare(module), spec.quantization, list(strategy.notes(module))
    if spec.quantization is not None:
        return module, spec.quantization, [f"matrices outside the head are stored as {spec.quantization}"]
    if own is not None:
        check_quantization(own.scheme, engine.quantizations, engine.name, gpu)
        return own.prepare(module), own.scheme, list(own.notes(module))
    if method in ("fp8", "fbgemm_fp8", "compressed-tensors"):
        return module, *_checkpoint_fp8(module, resolved, engine, gpu, method)
    if method is not None:
        return (
            module,
            None,
            [f"the checkpoint is quantised ({method}); its weights are counted as plain {module.dtype}: too many"],
        )
    return module, None, []


def _checkpoint_fp8(module, resolved, engine, gpu, method) -> tuple[str | None, list[str]]:
    config = resolved.config_dict["quantization_config"]
    text = str(config)
    if method == "compressed-tensors" and "float" not in text:
        return None, [
            f"the checkpoint is quantised ({method}, no float8): its weights are counted as plain: too many bytes"
        ]
    check_quantization("fp8", engine.quantizations, engine.name, gpu)
    skipped = config.get("modules_to_not_convert") or config.get("ignore") or config.get("ignored_layers") or []
    module.metapeak_not_packed = tuple(skipped)
    return "fp8", [
        f"the checkpoint's float8 weights: a byte each and a scale a row, outside {len(skipped)} named modules"
    ]
