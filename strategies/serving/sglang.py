"""SGLang: a static fraction for weights and cache; activations and graphs live in what is left.

What it changes: nothing; it is a rule for the budget.
Where each byte comes from: mem_fraction_static of the memory that is free before loading holds weights and the pool of
keys and values. Without the flag the fraction leaves 512 MB + 1.5 MB a token of chunked prefill (2048 at least) + 2 MB
a sequence of the largest CUDA graph + 1 GB for every eight ranks, at least 10 GiB on cards above 60.
Not modelled: speculative decoding and data-parallel attention, which reserve more; the smaller fraction of
models with a vision tower; the pool's page size.
Source: sglang srt/server_args.py (mem_fraction_static, chunked_prefill_size, cuda_graph_max_bs).
"""

from __future__ import annotations

from dataclasses import dataclass

from metapeak.strategies.serving.engines import Budget, Engine, EngineSettings, Request
from metapeak.tracer.device.overheads import MIB, overheads
from metapeak.tracer.gpus import Gpu

# (GPU's GiB below, chunked_prefill_size, cuda_graph_max_bs, that with tp >= 4): the branches of server_args.py.
_BUCKETS = (
    (20, 2048, 8, 8),
    (35, 2048, 24, 80),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
    (1 << 20, 16384, 512, 512),
)
_RANKS_DIVISOR = 8
# Above so many GiB at least so many MiB stay outside the fraction.
LARGE_CARD_GIB, LARGE_CARD_RESERVED_MIB = 60, 10 * 1024


@dataclass(frozen=True, kw_only=True)
class Sglang(Engine):
    """See the module."""

    def settings(self, request: Request, gpu: Gpu) -> EngineSettings:
        total = (gpu.driver_total_bytes or gpu.usable_bytes) / MIB
        _, chunk, few, many = next(bucket for bucket in _BUCKETS if total < bucket[0] * 1024)
        graphs = many if request.tp >= 4 else few
        chunk = request.max_num_batched_tokens or chunk
        notes, fraction = [], request.memory_fraction
        if fraction is None:
            reserved = 512 + 1.5 * max(chunk, 2048) + 2 * graphs + 1024 * request.tp * request.pp / _RANKS_DIVISOR
            if total > LARGE_CARD_GIB * 1024:
                reserved = max(reserved, LARGE_CARD_RESERVED_MIB)
            fraction = round((total - reserved) / total, 3)
            notes.append(f"mem_fraction_static {fraction:g}, chunked_prefill_size {chunk}: SGLang's own for this GPU")
        return EngineSettings(
            batched_tokens=chunk,
            max_seqs=request.max_num_seqs or graphs,
            block_size=request.block_size or 1,
            memory_fraction=fraction,
            notes=tuple(notes),
        )

    def budget(self, request: Request, settings: EngineSettings, gpu: Gpu) -> Budget:
        groups = [size for size in (request.tp, request.pp) if size > 1]
        context = [item for item in overheads(gpu, groups).items if item.name in ("cuda_context", "communicators")]
        return Budget(
            limit_bytes=int(gpu.usable_bytes * settings.memory_fraction),
            rule=f"{settings.memory_fraction:g} x (what torch sees - context) - weights; activations in the rest",
            charges=tuple(context),
            charges_activations=False,
        )


SGLANG = Sglang(
    name="sglang",
    quantizations=("nf4", "gptq4", "gptq8", "awq4", "fp8"),
    kv_dtypes=("bf16", "fp16", "fp32", "fp8"),
    own_layers=True,
    reads=("max_num_seqs", "block_size", "memory_fraction"),
)
