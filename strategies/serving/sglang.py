"""SGLang: a static fraction for weights and cache; activations and graphs live in what is left.

What it changes: nothing; it is a rule for the budget.
Where each byte comes from: mem_fraction_static of the memory that is free before loading holds weights and the pool of
keys and values. Without the flag the fraction leaves 512 MB + 1.5 MB a token of chunked prefill (2048 at least) + 2 MB
a sequence of the largest CUDA graph + 1 GB for every eight ranks.
Not modelled: speculative decoding and data-parallel attention, which reserve more; the pool's page size.
Source: sglang srt/server_args.py (mem_fraction_static, chunked_prefill_size, cuda_graph_max_bs).
"""

from __future__ import annotations

from dataclasses import dataclass

from metapeak.strategies.serving.engines import GIB, Budget, Engine, EngineSettings, Request
from metapeak.tracer.device.overheads import MIB, overheads
from metapeak.tracer.gpus import Gpu

# (GPU's GiB below, chunked_prefill_size, cuda_graph_max_bs): buckets of server_args.py.
_BUCKETS = ((20, 2048, 8), (35, 2048, 24), (60, 4096, 32), (90, 8192, 256), (160, 8192, 256), (1 << 20, 16384, 512))
_RANKS_DIVISOR = 8


@dataclass(frozen=True, kw_only=True)
class Sglang(Engine):
    """See the module."""

    def settings(self, request: Request, gpu: Gpu) -> EngineSettings:
        _, chunk, graphs = next(bucket for bucket in _BUCKETS if gpu.usable_bytes / GIB < bucket[0])
        chunk = request.max_num_batched_tokens or chunk
        notes, fraction = [], request.memory_fraction
        if fraction is None:
            total = (gpu.driver_total_bytes or gpu.usable_bytes) / MIB
            reserved = 512 + 1.5 * max(chunk, 2048) + 2 * graphs + 1024 * request.tp * request.pp / _RANKS_DIVISOR
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
    pads_vocabulary=True,
)
