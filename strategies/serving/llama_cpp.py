"""llama.cpp: nothing is profiled; weights, the whole cache and a compute buffer are allocated, or the start fails.

What it changes: nothing; it is a rule for the budget.
Where each byte comes from: matrices in GGUF blocks; the cache for every sequence's full context from the start, K and V
of sliding layers for the window and a micro-batch only; the compute buffer is taken as the traced activations of a
micro-batch of 512 tokens with their logits in float32.
Not modelled: mixed types of a file (Q4_K_M keeps some matrices in Q6_K), layers left on the CPU, the graph allocator's
reuse of buffers.
Source: llama.cpp src/llama-kv-cache.cpp, common/arg.cpp (-c, -ub, -ctk, -ctv, --swa-full); gguf 0.19 for block sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from metapeak.strategies.serving.engines import Budget, Engine, EngineSettings, Request
from metapeak.strategies.serving.formats import FORMATS
from metapeak.tracer.device.overheads import overheads
from metapeak.tracer.gpus import Gpu
from metapeak.tracer.kv_cache import CacheLayout

MICRO_BATCH = 512
# Cells of a cache are padded to this many (llama-kv-cache.cpp, n_pad with flash attention).
CELLS_PADDING = 256


@dataclass(frozen=True, kw_only=True)
class LlamaCpp(Engine):
    """See the module."""

    def settings(self, request: Request, gpu: Gpu) -> EngineSettings:
        micro_batch = min(request.max_num_batched_tokens or MICRO_BATCH, request.max_model_len)
        return EngineSettings(
            batched_tokens=micro_batch,
            max_seqs=request.max_num_seqs or 1,
            block_size=1,
            logits_rows=micro_batch,
            notes=(f"micro-batch of {micro_batch} tokens (-ub)", "all layers on the GPU (-ngl)"),
        )

    def budget(self, request: Request, settings: EngineSettings, gpu: Gpu) -> Budget:
        return Budget(
            limit_bytes=gpu.usable_bytes,
            rule="what the card has - context - weights - compute buffer; the cache is allocated whole at the start",
            charges=overheads(gpu).items,
        )

    def sequence_bytes(self, layout: CacheLayout, tokens: int, encoder_tokens: int, settings: EngineSettings) -> int:
        total = 0
        for layer in layout.layers:
            cells = encoder_tokens if layer.cross else tokens
            if layer.window is not None:
                window = -(-(layer.window + settings.batched_tokens) // CELLS_PADDING) * CELLS_PADDING
                cells = min(cells, window)
            total += layer.token_bytes * cells + layer.state_bytes
        return total


LLAMA_CPP = LlamaCpp(
    name="llama.cpp",
    quantizations=tuple(name for name in FORMATS if name != "fp8"),
    kv_dtypes=("fp16", "bf16", "fp32", "q8_0", "q4_0"),
    parallel=False,
    needs_bf16_card=False,
    samples=False,
    batches=False,
)
