"""`serve`: from a model and an engine's settings to weights, cache, budget and how many sequences fit.

What it changes: nothing; the model is built, quantised by the same strategies as in training, run on the phantom GPU.
Where each byte comes from: weights.py (storages), tracer/kv_cache.py (the real cache), activations.py (traced prefill),
and the engine's own file for the budget.
Not modelled: what each of those files says.
Sources: see those files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from metapeak.strategies.serving.checks import check_spec, longest_of, max_model_len_of
from metapeak.strategies.serving.engines import (
    Budget,
    Engine,
    EngineSettings,
    Request,
    find_engine,
    parse_version,
)
from metapeak.strategies.serving.formats import KV_DTYPES
from metapeak.strategies.serving.room import (
    ServingRank,
    fit_of,
    longest_context_of,
    ranks_of,
    tokens_of,
    traffic_of,
)
from metapeak.strategies.serving.served_model import SHORT_DTYPES, build_served, quantise
from metapeak.strategies.serving.speed import BANDWIDTH_REACHED, FLOPS_REACHED, Cost, Speed, costs_of, speed_of
from metapeak.tracer.errors import InputError
from metapeak.tracer.gpus import Gpu
from metapeak.tracer.kv_cache import PROBE_TOKENS, CacheLayout
from metapeak.tracer.simulation import Fit, How, ModelSummary, Verdict
from metapeak.tracer.spec import ModelSpec

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSpec:
    """How a model is served; None is the engine's default. Lengths in tokens.

    `max_model_len` None is the model's own maximum, `context` the length that sequences are counted at (None:
    max_model_len), `concurrency` how many of them are asked for, `encoder_tokens` of an encoder-decoder's input.
    `memory_fraction` is gpu_memory_utilization or mem_fraction_static, `cuda_graphs` False is enforce_eager.
    """

    engine: str = "transformers"
    engine_version: str | None = None
    tp: int = 1
    pp: int = 1
    quantization: str | None = None
    double_quant: bool = False
    group_size: int | None = None
    kv_dtype: str | None = None
    max_model_len: int | None = None
    context: int | None = None
    concurrency: int = 1
    encoder_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    memory_fraction: float | None = None
    cuda_graphs: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Serving:
    """What `serve` returns. Bytes are those of the rank that has the least room."""

    model: ModelSummary
    spec: ServingSpec
    settings: EngineSettings
    budget: Budget
    gpu: Gpu
    ranks: tuple[ServingRank, ...]
    weights_dtype: str
    max_model_len: int
    context: int
    encoder_tokens: int
    prefill_activation_bytes: int
    sequence_bytes: int
    kv_tokens: int
    max_concurrent_sequences: int
    concurrency_at_context: float
    longest_context: int
    fit: Fit
    how: How
    speed: Speed | None = None
    costs: tuple[Cost, ...] = ()

    @property
    def worst(self) -> ServingRank:
        return min(self.ranks, key=lambda rank: rank.kv_cache_bytes / max(rank.layout.bytes_per_token, 1))


def serve(
    model: str | ModelSpec,
    spec: ServingSpec | None = None,
    *,
    gpu: Gpu,
    progress: Callable[[str], None] = lambda what: None,
) -> Serving:
    """Memory of serving `model` on `gpu`: weights, cache, prefill, and how many sequences fit.

    Raises InputError or UnknownName where the model, engine or GPU cannot do what is asked, TraceError where the
    model's generation cannot be traced.
    """
    model = ModelSpec(reference=model) if isinstance(model, str) else model
    spec = spec or ServingSpec()
    engine = find_engine(spec.engine)
    check_spec(spec, engine, gpu)  # before the imports that take seconds

    started = time.perf_counter()
    progress("importing torch and transformers")
    import torch
    import transformers

    from metapeak.tracer.inference import check_generates
    from metapeak.tracer.kernels import device_of
    from metapeak.tracer.models import resolve_model

    seconds = {"import": time.perf_counter() - started}
    started = time.perf_counter()
    progress(f"building {model.reference}")
    resolved = resolve_model(model)
    built, notes = build_served(resolved, model, engine, gpu)
    module = built.module
    check_generates(module, resolved.id)
    longest = longest_of(module)
    max_model_len = max_model_len_of(spec.max_model_len, longest, resolved.id)
    request = Request(
        max_model_len=max_model_len,
        tp=spec.tp,
        pp=spec.pp,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        block_size=spec.block_size,
        memory_fraction=spec.memory_fraction,
        version=parse_version(spec.engine_version),
        cuda_graphs=spec.cuda_graphs,
        kv_dtype=spec.kv_dtype,
    )
    settings = engine.settings(request, gpu)
    summary = _summary(resolved, module)
    module, quantization, said = quantise(module, resolved, spec, engine, gpu)
    notes += said
    seconds["build"] = time.perf_counter() - started

    started = time.perf_counter()
    progress("prefill and two tokens")
    make_batch = _batches(module, resolved)
    layout, weights = _measured(module, make_batch, quantization)
    encoder, said = _encoder_tokens(module, layout, spec, max_model_len)
    notes += said
    context = spec.context or max_model_len
    if context > max_model_len:
        raise InputError(f"context {context} is past max_model_len {max_model_len}. Give at most that.")
    progress("prefill of the engine's batch")
    device = device_of(gpu)

    def activation_of(module: Any) -> tuple[int, float, tuple[str, ...]]:
        batches = _batches(module, resolved)
        return _activation(module, batches, layout, engine, request, settings, device)

    activation, flops, traced = _on_one_rank(
        activation_of, module, lambda: build_served(resolved, model, engine, gpu)[0].module, quantization, spec.tp
    )
    layout = _stored(layout, spec, engine, gpu, built.dtype)
    seconds["trace"] = time.perf_counter() - started

    budget = engine.budget(request, settings, gpu)
    ranks = ranks_of(module, weights, layout, engine, spec, settings, budget, activation, notes)
    worst = min(ranks, key=lambda rank: rank.kv_cache_bytes / max(rank.layout.bytes_per_token, 1))
    sequence = engine.sequence_bytes(worst.layout, context, encoder, settings)
    fit = fit_of(gpu, worst, sequence, spec.concurrency)
    room = min(max(0, worst.kv_cache_bytes // sequence), settings.max_seqs) if sequence else settings.max_seqs
    num_ranks = spec.tp * spec.pp
    speed = speed_of(
        gpu,
        traffic_of(module, weights, worst, flops, num_ranks),
        sequence_bytes=sequence,
        batch=room if engine.batches else spec.concurrency,
        ranks=num_ranks,
        dtype="fp8" if quantization == "fp8" else SHORT_DTYPES.get(built.dtype, "fp16"),
        checkpoint_bytes=sum(weight.nbytes for weight in weights),
    )
    assumptions = [*resolved.notes, *built.notes, *notes, *traced, *engine.assumptions(request, settings)]
    assumptions += _layout_notes(layout)
    if speed is not None:
        assumptions.append(
            f"decode reaches {BANDWIDTH_REACHED[0]:.0%} to {BANDWIDTH_REACHED[1]:.0%} of the data sheet's bandwidth, "
            f"prefill {FLOPS_REACHED[0]:.0%} to {FLOPS_REACHED[1]:.0%} of its dense FLOPs; communication takes no time"
        )
    return Serving(
        model=summary,
        spec=spec,
        settings=settings,
        budget=budget,
        gpu=gpu,
        ranks=ranks,
        weights_dtype=built.dtype,
        max_model_len=max_model_len,
        context=context,
        encoder_tokens=encoder,
        prefill_activation_bytes=activation,
        sequence_bytes=sequence,
        kv_tokens=tokens_of(engine, worst, settings, context, encoder),
        max_concurrent_sequences=max(0, worst.kv_cache_bytes // sequence) if sequence else 0,
        concurrency_at_context=max(0.0, worst.kv_cache_bytes / sequence) if sequence else 0.0,
        longest_context=longest_context_of(engine, worst, settings, max_model_len, encoder),
        fit=fit,
        speed=speed if fit.verdict is not Verdict.DOES_NOT_FIT else None,
        costs=tuple(costs_of(gpu, speed, num_ranks)) if speed and fit.verdict is not Verdict.DOES_NOT_FIT else (),
        how=How(
            torch=torch.__version__,
            transformers=transformers.__version__,
            seconds=seconds,
            assumptions=tuple(dict.fromkeys(assumptions)),
            not_modelled=(),
        ),
    )


# -- the model ---------------------------------------------------------------------------------------------------------


def _summary(resolved: Any, module: Any) -> ModelSummary:
    parameters = {id(tensor): tensor for tensor in module.parameters()}.values()
    return ModelSummary(
        id=resolved.id,
        source=resolved.source,
        architecture=type(module).__name__,
        parameters=sum(tensor.numel() for tensor in parameters),
        trainable_parameters=0,
        parameter_bytes=sum(tensor.numel() * tensor.element_size() for tensor in parameters),
    )


def _batches(module: Any, resolved: Any) -> Callable[[int, int], Mapping[str, Any]]:
    """A function of (sequences, tokens) that makes the forward's inputs for generation."""
    from metapeak.tracer.inference import generation_batch

    return lambda sequences, tokens: generation_batch(module, resolved.task, sequences, tokens)


# -- measured ----------------------------------------------------------------------------------------------------------


def _encoder_tokens(module: Any, layout: CacheLayout, spec: ServingSpec, max_model_len: int) -> tuple[int, list[str]]:
    """(positions of the encoder whose keys and values a sequence keeps, what to say of a default)."""
    if not layout.cross_bytes_per_token:
        if spec.encoder_tokens is not None:
            raise InputError(
                f"encoder_tokens: {type(module).__name__} keeps nothing of an encoder. Leave it out; --context is the "
                "length of a sequence."
            )
        return 0, []
    if spec.encoder_tokens is not None:
        return spec.encoder_tokens, []
    own = getattr(module.config, "max_source_positions", None)
    tokens = own or max_model_len
    why = "the encoder's positions" if own else "as long as max_model_len"
    return tokens, [f"cross-attention keeps {tokens} positions of the encoder, {why} (--encoder-tokens for another)"]


def _measured(module: Any, make_batch: Callable, quantization: str | None):
    """(layout of the cache, storages of weights)."""
    from metapeak.strategies.serving.weights import weights_of
    from metapeak.tracer.capture import move_to_phantom
    from metapeak.tracer.flash_attention import flash_attention_2_available
    from metapeak.tracer.kv_cache import measure_cache

    weights = weights_of(module, quantization, module.config.get_text_config(decoder=True).num_hidden_layers)
    move_to_phantom(module)
    with flash_attention_2_available():
        layout = measure_cache(module, make_batch(1, PROBE_TOKENS))
    return layout, weights


def _on_one_rank(activation_of: Callable, module: Any, rebuild: Callable[[], Any], quantization: str | None, tp: int):
    """`activation_of` the module as one of `tp` ranks has it, cut by transformers' own tensor parallelism; of the whole
    module where it cannot be cut, which is said. FLOPs are those of all ranks.
    """
    from metapeak.strategies.parallel.layout import Layout
    from metapeak.strategies.parallel.tensor_parallel import TensorParallel
    from metapeak.tracer.capture import move_to_phantom
    from metapeak.tracer.dispatch import unrecorded
    from metapeak.tracer.distributed import one_rank_of
    from metapeak.tracer.flash_attention import flash_attention_2_available

    if tp == 1:
        return activation_of(module)
    why = f"{quantization} layers are not cut here" if quantization else None
    if why is None:
        with one_rank_of(tp, 0), flash_attention_2_available():
            cut = rebuild()
            move_to_phantom(cut)
            try:
                with unrecorded():
                    cut = TensorParallel(layout=Layout(tp=tp)).distribute(cut)
            except InputError as error:
                why = str(error)
            else:
                activation, flops, notes = activation_of(cut)
                return activation, flops * tp, (*notes, f"prefill of one of {tp} ranks, cut by the model's own plan")
    activation, flops, notes = activation_of(module)
    return activation, flops, (*notes, f"prefill traced whole, more than a rank's ({why})")


def _activation(module, make_batch, layout, engine: Engine, request: Request, settings: EngineSettings, device):
    from metapeak.strategies.serving.activations import prefill_activation_bytes, sampler_bytes
    from metapeak.tracer.attention import AttentionChoice, attention_choice
    from metapeak.tracer.flash_attention import flash_attention_2_available
    from metapeak.tracer.sequences import vocabulary_size

    choice = AttentionChoice(compute_capability=device.compute_capability, forced=None)
    with attention_choice(choice), flash_attention_2_available():
        activation, flops, notes = prefill_activation_bytes(
            module, make_batch, layout, settings, request.max_model_len, device, settings.logits_rows
        )
        if engine.samples and settings.logits_rows > 1:
            rows, vocabulary = settings.logits_rows, vocabulary_size(module)
            sorts = engine.sorts_logits(request)
            sampled = sampler_bytes(rows, vocabulary, module.dtype, device, sorts=sorts)
            if sampled > activation:
                activation = sampled
                notes = (*notes, f"the sampler over {rows} sequences needs more than the prefill, {sampled:,} bytes")
    return activation, flops, notes


def _stored(layout: CacheLayout, spec: ServingSpec, engine: Engine, gpu: Gpu, dtype: str) -> CacheLayout:
    """The layout with keys and values in the dtype that was asked for."""
    if spec.kv_dtype is None:
        return layout
    return layout.in_dtype(KV_DTYPES[spec.kv_dtype], _ITEMSIZE[layout.dtype])


def _layout_notes(layout: CacheLayout) -> list[str]:
    kinds = sorted({layer.kind for layer in layout.layers})
    notes = [f"cache as transformers keeps it: {layout.kind} of {len(layout.layers)} layers ({', '.join(kinds)})"]
    if layout.state_bytes:
        notes.append("states of convolutions and recurrences have the dtype that transformers gives them")
    return notes
