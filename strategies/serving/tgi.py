"""Text Generation Inference: keys and values of one maximal prefill, then a share of what that leaves free.

What it changes: nothing; it is a rule for the budget.
Where each byte comes from: after loading, the largest prefill batch runs with its own blocks; TGI_WIGGLE_ROOM (0.90) of
the memory that is free then becomes further blocks. CUDA graphs are captured afterwards, from the rest.
Not modelled: the launcher's own estimate of max_batch_prefill_tokens, speculation.
Source: text-generation-inference server/models/flash_causal_lm.py (warmup), models/globals.py, at db931fc.
"""

from __future__ import annotations

from dataclasses import dataclass

from metapeak.strategies.serving.engines import Budget, Engine, EngineSettings, Request
from metapeak.tracer.device.overheads import overheads
from metapeak.tracer.gpus import Gpu

WIGGLE_ROOM = 0.90
DEFAULT_PREFILL_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Tgi(Engine):
    """See the module."""

    def settings(self, request: Request, gpu: Gpu) -> EngineSettings:
        tokens = request.max_num_batched_tokens
        notes = []
        if tokens is None:
            tokens = max(DEFAULT_PREFILL_TOKENS, request.max_model_len)
            notes.append(f"the largest prefill has {tokens} tokens (--max-num-batched-tokens for another)")
        return EngineSettings(
            batched_tokens=tokens,
            max_seqs=request.max_num_seqs or 128,
            block_size=request.block_size or 1,
            memory_fraction=1.0 if request.memory_fraction is None else request.memory_fraction,
            notes=(*notes, f"TGI_WIGGLE_ROOM {WIGGLE_ROOM:g}, blocks of {request.block_size or 1} token (flashinfer)"),
        )

    def budget(self, request: Request, settings: EngineSettings, gpu: Gpu) -> Budget:
        groups = [size for size in (request.tp, request.pp) if size > 1]
        return Budget(
            limit_bytes=int(gpu.usable_bytes * settings.memory_fraction),
            rule=f"{WIGGLE_ROOM:g} x (what torch sees - context - weights - warm-up), and the warm-up's own blocks",
            charges=overheads(gpu, groups).items,
            share=WIGGLE_ROOM,
        )


TGI = Tgi(
    name="tgi",
    quantizations=("nf4", "fp4", "int8", "gptq4", "awq4", "fp8"),
    kv_dtypes=("bf16", "fp16", "fp8"),
    reads=("max_num_seqs", "block_size", "memory_fraction"),
)
