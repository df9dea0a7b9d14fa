"""vLLM: a fraction of the whole GPU, a profile run, and the rest in blocks for keys and values.

What it changes: nothing; it is a rule for the budget.
Where each byte comes from: the limit is gpu_memory_utilization of what torch sees of the card; charged are the weights,
what libraries took beside the caching allocator while loading and profiling, the peak of one dummy forward of
max_num_batched_tokens with the sampler over max_num_seqs, and since 0.21 an estimate of the CUDA graphs. Keys and
values fill whole blocks; a layer with a sliding window of a model with other layers keeps the window and one prefill
more.
Not modelled: padding of hybrid models' pages to one size, speculative decoding, LoRA slots, dummy multimodal inputs.
Sources: vllm v1/worker/gpu_worker.py (determine_available_memory), v1/kv_cache_interface.py (page_size_bytes,
SlidingWindowSpec.max_memory_usage_bytes), engine/arg_utils.py (get_batch_defaults), utils/mem_utils.py
(memory_profiling), read at 35d5cda; logs in its issues 13061, 13882 and LMCache issue 3430 for the ranges below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from metapeak.strategies.serving.engines import GIB, Budget, Engine, EngineSettings, Request
from metapeak.tracer.device.overheads import MIB, Overhead, overheads
from metapeak.tracer.gpus import Gpu
from metapeak.tracer.kv_cache import CacheLayout

# Engine generation 1 is the default from here on; before it, sequences were profiled and chunked prefill was off.
V1 = (0, 8)
# From here on an estimate of the CUDA graphs is deducted (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS, default 1).
GRAPHS_DEDUCTED = (0, 21)
# Top-k and top-p in a Triton kernel, without sorting the vocabulary: pull request 33538, merged in February 2026; the
# release after it.
NO_SORT = (0, 17)
# Before, all that the card holds beside torch's own was charged, from here on what it grew by while loading.
NON_TORCH_GROWTH = (0, 7)
CHUNKED_DEFAULT_ABOVE = 32768
_SERVER = "as `vllm serve` takes without the flag (engine/arg_utils.py, UsageContext.OPENAI_API_SERVER)"

_NON_TORCH = Overhead(
    name="non_torch",
    low_bytes=30 * MIB,
    high_bytes=260 * MIB,
    tag="assumed",
    source="kernels and handles loaded while profiling, beyond the context that was there before: 0.03 GiB (0.7.3), "
    "0.07 (0.10.2), 0.08 (0.10.0), 0.16 (0.26), 0.25 (0.7.2 on two cards) in start-up logs",
)
_GRAPHS_ESTIMATE = Overhead(
    name="cuda_graphs_estimate",
    low_bytes=round(0.5 * GIB),
    high_bytes=round(1.55 * GIB),
    typical_bytes=round(0.58 * GIB),
    tag="assumed",
    source="deducted since 0.21: estimates of 0.52, 0.58 and 1.55 GiB in start-up logs; grows with the sizes captured",
)
_GRAPHS_OUTSIDE = Overhead(
    name="cuda_graphs",
    low_bytes=round(0.08 * GIB),
    high_bytes=round(1.12 * GIB),
    tag="assumed",
    source="captured after the cache is there, outside the limit: 0.08 to 1.12 GiB in start-up logs",
)


def _everything_else(ranks: int) -> Overhead:
    """Context, libraries and communicators of a rank before 0.7."""
    return Overhead(
        name="non_torch",
        low_bytes=round(0.35 * GIB) * min(ranks, 2),
        high_bytes=round(1.79 * GIB) * min(ranks, 2),
        tag="assumed",
        source="before 0.7 everything on the card beside torch's allocations is charged, context and NCCL too: "
        "0.35 GiB on an RTX 3090 (issue 10517), 1.79 on one H100, 3.58 on each of two (pull request 10511)",
    )


@dataclass(frozen=True, kw_only=True)
class Vllm(Engine):
    """See the module."""

    def settings(self, request: Request, gpu: Gpu) -> EngineSettings:
        version = request.version or self.version
        large = gpu.usable_bytes >= 70 * GIB and "a100" not in gpu.id
        notes = []
        seqs = request.max_num_seqs
        if seqs is None:
            seqs = 1024 if large and version >= V1 else 256
            notes.append(f"max_num_seqs {seqs}, {_SERVER}")
        tokens = request.max_num_batched_tokens
        if tokens is None:
            tokens = self._batched_tokens(version, large, request.max_model_len)
            notes.append(f"max_num_batched_tokens {tokens}, {_SERVER}")
        fraction = request.memory_fraction
        if fraction is None:
            fraction = 0.9
            notes.append("gpu_memory_utilization 0.9, vLLM's default")
        return EngineSettings(
            batched_tokens=tokens,
            max_seqs=seqs,
            block_size=request.block_size or 16,
            memory_fraction=fraction,
            logits_rows=min(seqs, tokens),
            notes=tuple(notes),
        )

    @staticmethod
    def _batched_tokens(version: tuple[int, ...], large: bool, max_model_len: int) -> int:
        if version >= V1:
            return 8192 if large else 2048
        chunked = max_model_len > CHUNKED_DEFAULT_ABOVE
        return 2048 if chunked else max(max_model_len, 2048)

    def budget(self, request: Request, settings: EngineSettings, gpu: Gpu) -> Budget:
        version = request.version or self.version
        charges = [_NON_TORCH if version >= NON_TORCH_GROWTH else _everything_else(request.tp * request.pp)]
        if request.tp * request.pp > 1 and version >= NON_TORCH_GROWTH:
            groups = [size for size in (request.tp, request.pp) if size > 1]
            charges += [
                item if gpu.has_fast_link else replace(item, typical_bytes=item.low_bytes)  # few channels over PCIe
                for item in overheads(gpu, groups).items
                if item.name == "communicators"
            ]
        deducted = request.cuda_graphs and version >= GRAPHS_DEDUCTED
        if deducted:
            charges.append(_GRAPHS_ESTIMATE)
        return Budget(
            limit_bytes=int(gpu.usable_bytes * settings.memory_fraction),
            rule=f"{settings.memory_fraction:g} x what torch sees - weights - non-torch - profile run"
            + (" - estimate of CUDA graphs" if deducted else ""),
            charges=tuple(charges),
            outside=(_GRAPHS_OUTSIDE,) if request.cuda_graphs and not deducted else (),
        )

    def sequence_bytes(self, layout: CacheLayout, tokens: int, encoder_tokens: int, settings: EngineSettings) -> int:
        block, total = settings.block_size, 0
        full = any(layer.token_bytes and layer.window is None and not layer.cross for layer in layout.layers)
        for layer in layout.layers:
            held = encoder_tokens if layer.cross else tokens
            blocks = -(-held // block)
            if layer.window is not None and full:
                kept = min(layer.window - 1 + settings.batched_tokens, tokens)
                blocks = min(-(-kept // block) + 1, blocks)
            total += layer.token_bytes * blocks * block + layer.state_bytes
        return total

    def sorts_logits(self, request: Request) -> bool:
        return (request.version or self.version) < NO_SORT

    def assumptions(self, request: Request, settings: EngineSettings) -> tuple[str, ...]:
        version = request.version or self.version
        said = "" if request.version else " (the newest whose log is known here; --engine-version names another)"
        return (f"vLLM {'.'.join(map(str, version))}{said}", *settings.notes)


VLLM = Vllm(
    name="vllm",
    version=(0, 26),
    quantizations=("nf4", "int8", "gptq4", "gptq8", "awq4", "fp8"),
    kv_dtypes=("bf16", "fp16", "fp32", "fp8"),
    own_layers=True,
    reads=("engine_version", "max_num_seqs", "block_size", "memory_fraction", "cuda_graphs"),
)
