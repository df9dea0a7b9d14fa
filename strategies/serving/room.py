"""What weights, activations and charges leave on each rank for the cache, and what fits into it.

What it changes: nothing; it turns measured sizes and an engine's budget into room.
Where each byte comes from: weights.py (storages, cut over ranks), the engine's own file for limit and charges.
Not modelled: what those files say.
Sources: see those files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metapeak.strategies.serving.engines import Budget, Engine, EngineSettings, total_of
from metapeak.strategies.serving.speed import Traffic
from metapeak.tracer.device.overheads import Overhead
from metapeak.tracer.errors import InputError
from metapeak.tracer.gpus import Gpu
from metapeak.tracer.kv_cache import CacheLayout
from metapeak.tracer.simulation import Fit, Verdict

if TYPE_CHECKING:
    from metapeak.strategies.serving.serve import ServingSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingRank:
    """A rank of a stage: its place, weights, cache layout and what is left for the cache, all in bytes.

    `weights_bytes` is what the engine prints (blocks of the caching allocator for those with layers of their own),
    `weights_requested_bytes` the sum of the storages. `kv_cache_range` is what the ranges of the charges leave:
    (least, most).
    """

    rank: int
    stage: int
    weights_bytes: int
    weights_requested_bytes: int
    layout: CacheLayout
    charges: tuple[Overhead, ...]
    kv_cache_bytes: int
    kv_cache_range: tuple[int, int]


def ranks_of(module, weights, layout, engine, spec, settings, budget, activation, notes) -> tuple[ServingRank, ...]:
    from metapeak.strategies.serving.weights import (
        allocated_bytes,
        padded_vocabulary_bytes,
        plan_of,
        rank_sizes,
        rotary_tables,
        stages_of,
    )

    num_blocks = module.config.get_text_config(decoder=True).num_hidden_layers
    heads = max((layer.heads for layer in layout.layers), default=1)
    _check_degrees(spec, module.config.get_text_config(decoder=True), heads, num_blocks)
    plan, said = plan_of(module, weights) if spec.tp > 1 else ({}, None)
    if said:
        notes.append(said)
    added = []
    if engine.own_layers:
        added = [("vocabulary padding", -(-padded_vocabulary_bytes(module) // spec.tp))]
        added += [("rotary table", rows * size * module.dtype.itemsize) for rows, size in rotary_tables(module)]
    stages = stages_of(num_blocks, spec.pp)
    low, expected, high = total_of(budget.charges)
    found = []
    for stage, blocks in enumerate(stages):
        sizes = rank_sizes(weights, plan, tp=spec.tp, stage=stage, stages=stages, kv_heads=heads) + added
        requested = sum(size for _, size in sizes)
        nbytes = allocated_bytes(sizes) if engine.own_layers else requested
        left = [
            _left(budget, nbytes, activation if budget.charges_activations else 0, charged, settings, layout)
            for charged in (high, expected, low)
        ]
        found.append(
            ServingRank(
                rank=stage * spec.tp,
                stage=stage,
                weights_bytes=nbytes,
                weights_requested_bytes=requested,
                layout=layout.on_ranks(spec.tp, None if spec.pp == 1 else blocks),
                charges=budget.charges,
                kv_cache_bytes=left[1],
                kv_cache_range=(left[0], left[2]),
            )
        )
    return tuple(found)


def _left(
    budget: Budget, weights: int, activation: int, charged: int, settings: EngineSettings, layout: CacheLayout
) -> int:
    rest = budget.limit_bytes - weights - activation - charged
    if budget.share == 1.0:
        return rest
    own = layout.bytes_per_token * settings.batched_tokens  # the warm-up prefill's own blocks
    return int((rest - own) * budget.share) + own


def _check_degrees(spec: ServingSpec, config: Any, heads: int, num_blocks: int) -> None:
    queries = getattr(config, "num_attention_heads", None)
    if queries and queries % spec.tp:
        raise InputError(
            f"tp {spec.tp}: {queries} attention heads do not divide over {spec.tp} ranks (heads % tp == 0)."
        )
    if heads > 1 and heads % spec.tp and spec.tp % heads:
        raise InputError(
            f"tp {spec.tp}: {heads} heads of keys and values neither divide over the ranks nor repeat evenly "
            "(heads % tp == 0 or tp % heads == 0)."
        )
    if spec.pp > num_blocks:
        raise InputError(f"pp {spec.pp}: the model has {num_blocks} blocks only (pp <= blocks).")


def traffic_of(module: Any, weights: list, rank: ServingRank, flops: float, ranks: int) -> Traffic:
    """What a decoded token reads on a rank: embeddings by rows (nothing), experts by the batch's routing."""
    total = sum(weight.nbytes for weight in weights) or 1
    head = module.get_output_embeddings()
    table = module.get_input_embeddings()
    tied = head is not None and getattr(head, "weight", None) is getattr(table, "weight", table)
    rows = 0 if tied else sum(weight.nbytes for weight in weights if weight.kind == "embedding")
    experts = sum(weight.nbytes for weight in weights if ".experts" in f".{weight.module}")
    config = module.config.get_text_config(decoder=True)
    names = (
        ("num_experts", "num_local_experts", "n_routed_experts"),
        ("num_experts_per_tok", "moe_topk", "top_k_experts"),
    )
    count, active = (next((getattr(config, n) for n in group if getattr(config, n, None)), 1) for group in names)
    share = rank.weights_requested_bytes / total
    return Traffic(
        always_bytes=round((total - rows - experts) * share),
        expert_bytes=round(experts * share),
        experts=count,
        active=min(active, count),
        prefill_flops=flops,
    )


def tokens_of(engine: Engine, rank: ServingRank, settings: EngineSettings, context: int, encoder: int) -> int:
    """Tokens that the cache holds: whole blocks where every layer keeps every token, else sequences x context."""
    layout = rank.layout
    if rank.kv_cache_bytes <= 0:
        return 0
    if layout.bytes_per_token and not layout.windows and not layout.state_bytes and not layout.cross_bytes_per_token:
        return rank.kv_cache_bytes // (layout.bytes_per_token * settings.block_size) * settings.block_size
    sequence = engine.sequence_bytes(layout, context, encoder, settings)
    return int(rank.kv_cache_bytes / sequence * context) if sequence else 0


def longest_context_of(engine: Engine, rank: ServingRank, settings: EngineSettings, most: int, encoder: int) -> int:
    """The longest single sequence that the cache holds, at most `most`; 0 where none fits."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if engine.sequence_bytes(rank.layout, middle, encoder, settings) <= rank.kv_cache_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def fit_of(gpu: Gpu, rank: ServingRank, sequence: int, concurrency: int) -> Fit:
    """Fits: the asked sequences have room even at the ranges' worst end; borderline: only at the best."""
    need = sequence * concurrency
    least, most = rank.kv_cache_range
    verdict = Verdict.FITS if least >= need else Verdict.BORDERLINE if most >= need else Verdict.DOES_NOT_FIT
    used = tuple(gpu.usable_bytes - left + need for left in (most, least))
    return Fit(gpu=gpu, verdict=verdict, headroom_bytes=rank.kv_cache_bytes - need, device_range=used)
