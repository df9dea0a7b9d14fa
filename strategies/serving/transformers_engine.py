"""transformers' own generate: everything that the card has beside context, weights and the prefill is for the cache.

What it changes: nothing; it is a rule for the budget.
Where each byte comes from: the traced prefill of one prompt of the full context, with logits of its last position; the
dynamic cache grows token by token, and while a layer's keys and values grow the old ones are still there.
Not modelled: fragmentation of a cache that grows; several prompts in one prefill.
Source: transformers 5.24 generation/utils.py, cache_utils.py (DynamicLayer.update).
"""

from __future__ import annotations

from dataclasses import dataclass

from metapeak.strategies.serving.engines import Budget, Engine, EngineSettings, Request
from metapeak.tracer.device.overheads import overheads
from metapeak.tracer.gpus import Gpu


@dataclass(frozen=True, kw_only=True)
class Transformers(Engine):
    """See the module."""

    def settings(self, request: Request, gpu: Gpu) -> EngineSettings:
        tokens = request.max_num_batched_tokens or request.max_model_len
        return EngineSettings(
            batched_tokens=tokens,
            max_seqs=request.max_num_seqs or 1,
            notes=(f"a prompt of {tokens} tokens is prefilled in one forward",),
        )

    def budget(self, request: Request, settings: EngineSettings, gpu: Gpu) -> Budget:
        groups = [request.tp] if request.tp > 1 else []
        return Budget(
            limit_bytes=gpu.usable_bytes,
            rule="what torch sees - context - weights - prefill",
            charges=overheads(gpu, groups).items,
        )


TRANSFORMERS = Transformers(
    name="transformers",
    quantizations=("nf4", "fp4", "int8", "gptq4", "gptq8", "awq4", "fp8"),
    kv_dtypes=("bf16", "fp16", "fp32"),
    casts_float32=False,
    flash=False,
    needs_bf16_card=False,
    samples=False,
    batches=False,
)
