"""The order in which everything happens, as one straight line: read `simulate` first."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Mapping, Sequence

from metapeak.strategies.attention import check_attention, check_attention_of
from metapeak.strategies.base import Strategy
from metapeak.strategies.lifecycle import (
    Lifecycle,
    check_lifecycle,
    host_memory,
    lived_on,
    load_peak_bytes,
    notes_of,
    way_of,
    with_loading,
    written_bytes,
)
from metapeak.strategies.loading import loading_of
from metapeak.strategies.optimizers import check_optimizer
from metapeak.strategies.packages import for_package
from metapeak.strategies.parallel.checkpoints import with_real_checkpoints
from metapeak.strategies.parallel.pipeline import pipeline_of
from metapeak.strategies.parallel.pipeline_traces import Traces
from metapeak.strategies.parallel.ranks import (
    distinct_ranks,
    engine_of,
    layout_notes,
    layout_of,
)
from metapeak.strategies.parallel.shard_sizes import can_differ_in_shards_alone, graph_of_rank
from metapeak.strategies.parallel.tensor_parallel import logits_parts
from metapeak.strategies.parallel.unshared import not_shared
from metapeak.strategies.precision import check_precision
from metapeak.strategies.prepared import plain_graph, set_up, trace, trace_life
from metapeak.strategies.presets import preset_notes
from metapeak.strategies.quantization.from_config import with_checkpoint_quantization
from metapeak.strategies.quantization.strategy import check_base_is_frozen
from metapeak.strategies.resolved_options import resolved_options, strategy_options
from metapeak.strategies.unasked import Unasked, unasked_life, unasked_phases
from metapeak.tracer.device.allocator_config import DEFAULT_CONFIG, AllocatorConfig
from metapeak.tracer.device.overheads import overheads
from metapeak.tracer.errors import InputError
from metapeak.tracer.gpus import Gpu
from metapeak.tracer.kernels import KernelWorkspaces, device_of
from metapeak.tracer.simulation import How, ModelSummary, Option, RankResult, Simulation, played_actions
from metapeak.tracer.spec import ModelSpec, StepSpec

# Sizes beyond which a batch or sequence is taken for a slip of the finger.
MAX_BATCH_SIZE = 1 << 20
MAX_SEQ_LEN = 1 << 24


def simulate(
    model: str | ModelSpec,
    step: StepSpec | None = None,
    strategies: Sequence[Strategy] = (),
    *,
    gpu: Gpu | None = None,
    allocator: AllocatorConfig | None = None,
    options: Mapping[str, Option] | None = None,
    lifecycle: Lifecycle | None = None,
    whole_life: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> Simulation:
    """Peak memory of one training step of `model`, traced; with a `lifecycle` that of evaluation and saving, too.

    Arguments: a model reference or ModelSpec, the step, strategies, the GPU to judge the result for (it also decides
    kernels and workspaces; without one an NVIDIA GPU of compute capability 8.0 is assumed), the settings of the caching
    allocator (None: PyTorch's defaults), the options as their caller resolved them (recorded in the result with the
    origin of each), whether evaluation and saving are shown where the lifecycle does not ask for them (counted in
    nothing: unasked.py), and a function told what is going on.

    Raises ModelNotFound, ModelConfigError, UnknownName or InputError when the input cannot be used, and TraceError
    with op, module and reason when the model's step cannot be traced. It never falls back to an estimate.

        >>> from metapeak.strategies import simulate
        >>> from metapeak.tracer import StepSpec
        >>> result = simulate("openai-community/gpt2", StepSpec(batch_size=1, seq_len=128))
        >>> result.model.parameters
        124439808
    """
    spec = ModelSpec(reference=model) if isinstance(model, str) else model
    step = step or StepSpec()
    seconds: dict[str, float] = {}
    check_step(step)  # before the imports that take seconds
    check_precision(spec, step, gpu)

    started = time.perf_counter()
    progress("importing torch and transformers")
    import torch
    import transformers

    for package in dict.fromkeys(name for strategy in strategies for name in strategy.imports):
        importlib.import_module(package)

    from metapeak.tracer import capture  # noqa: F401  (what comes later takes its seconds here)
    from metapeak.tracer.models import resolve_model

    seconds["import"] = time.perf_counter() - started

    started = time.perf_counter()
    progress(f"building {spec.reference}")
    resolved = resolve_model(spec)
    check_attention_of(resolved, step.attention)
    strategies, checkpoint_notes = with_checkpoint_quantization(resolved, for_package(resolved, strategies))
    for strategy in strategies:
        strategy.check(resolved, step)
    check_base_is_frozen(resolved, strategies)
    life = lifecycle or Lifecycle()
    check_lifecycle(life, strategies)
    layout = layout_of(strategies)
    strategies = with_real_checkpoints(
        layout,
        strategies,
        lambda alone: set_up(resolved, spec, step, alone, gpu).module,
        functools.partial(plain_graph, resolved, spec, step, gpu),
    )
    first = set_up(resolved, spec, step, strategies, gpu)
    summary = _summary(resolved, first.built.module, first.module)
    given = strategy_options(strategies, first.module, options or {})
    pipeline = pipeline_of(strategies)
    if life.after_training and (pipeline is not None or engine_of(strategies) is not None):
        raise InputError("Evaluation, generation and saving are not predicted in a pipeline, nor under DeepSpeed.")
    notes = [strategy.notes(first.module) for strategy in strategies]
    loading = loading_of(first.module, way_of(life, layout))
    written = written_bytes(life, first.module)
    by_trainer = first.built.package is None and first.built.batch is None
    beside = unasked_life(life, strategies, step, options or {}, by_trainer=by_trainer)
    written_beside = written_bytes(beside, first.module)
    load_peak = load_peak_bytes(loading, way_of(life, layout), layout)
    classes, rank_notes = distinct_ranks(layout, first.module, strategies)
    seconds["build"] = time.perf_counter() - started

    # Every distinct rank is traced on its own: what it holds is decided before the first operation. Where only the
    # sizes of shards differ, one trace answers for all.
    traced = []
    rows = {name: parameter.shape[0] for name, parameter in first.module.named_parameters() if parameter.dim()}
    alike = can_differ_in_shards_alone(strategies, layout)

    def record(strategies, layout, rank):
        # A pipeline's ranks are copies of their stages; other ranks use up the module that was built.
        prepared = first.again() if traced and pipeline is None else first
        return trace(prepared, step, strategies, layout, rank, progress)

    traces = Traces(layout=layout, strategies=strategies, record=record)
    for one in classes:
        started = time.perf_counter()
        if len(classes) > 1:
            progress(f"rank {one.rank} of {layout.world_size}")
        told = graph_of_rank(traced[0][1], rows, layout, one.rank) if traced and alike else None
        step_of_rank = traces.of(one.rank, first.module) if told is None else traces.rewritten(told, traced[0][2])
        graph, answered, liveness = step_of_rank.graph, step_of_rank.answered, step_of_rank.liveness
        later = None
        if life.after_training:
            later, more = trace_life(life, first.again(), resolved, step, strategies, layout, one.rank, progress)
            answered = {**answered, **more}
        seconds["trace"] = seconds.get("trace", 0.0) + time.perf_counter() - started

        started = time.perf_counter()
        # Workspaces last: what the rewritten step runs again takes its workspace again.
        # A rank told from another one takes the same: no kernel with a workspace has a shard's size (shard_sizes.py).
        workspaces = KernelWorkspaces.of(graph, device_of(gpu)) if told is None else traced[0][3]
        liveness = workspaces.added_to(liveness)
        shared = layout is not None
        parts = logits_parts(strategies)
        not_shared_here = not_shared(graph, liveness, first.built.module, logits_parts=parts) if shared else {}
        if later is not None:
            liveness = lived_on(liveness, later, strategies, KernelWorkspaces.of(later, device_of(gpu)))
        if life.load is not None:
            liveness = with_loading(liveness, load_peak)
        liveness.lint()
        rank = RankResult(
            rank=one.rank,
            count=one.count,
            coordinates=layout.coordinates(one.rank) if layout else {},
            liveness=liveness,
            allocator=allocator or DEFAULT_CONFIG,
            overheads=overheads(gpu, layout.groups if layout else ()),
            not_shared=not_shared_here,
            host=host_memory(
                life,
                loading,
                liveness,
                written,
                later.host_bytes if later else 0,
                layout,
                graph.host_bytes + sum(strategy.offloaded_bytes(graph) for strategy in strategies),
            ),
            load_peak_bytes=load_peak,
            actions=played_actions(step_of_rank.actions, liveness),
        )
        _ = rank.reservation  # counted in the seconds of this stage
        traced.append((rank, graph, answered, workspaces))
        seconds["liveness"] = seconds.get("liveness", 0.0) + time.perf_counter() - started
    worst, graph, answered, workspaces = max(traced, key=lambda one: one[0].device_bytes)
    built, tensors, make_optimizer = first.built, first.tensors, first.make_optimizer

    unasked = Unasked()
    if whole_life:
        started = time.perf_counter()
        progress("evaluation and saving")
        unasked = unasked_phases(
            beside,
            worst.liveness,
            strategies,
            lambda more: trace_life(more, first.again(), resolved, step, strategies, layout, worst.rank, progress),
            lambda more, kept: host_memory(more, loading, worst.liveness, written_beside, kept, layout),
        )
        seconds["life"] = time.perf_counter() - started

    assumptions = [
        *resolved.notes,
        *(preset_notes(options or {}) if resolved.package is None else ()),
        *checkpoint_notes,
        *first.notes,
        *answered,
        *rank_notes,
        *layout_notes(layout, step, strategies),
        *notes_of(life, first.tensors, own_batch=first.built.batch is not None),
        *unasked.assumptions,
    ]
    for strategy, said in zip(strategies, notes):
        assumptions += [*strategy.assumptions(), *said, *strategy.remarks(graph)]
    if make_optimizer is not None:
        assumptions += [*make_optimizer.assumptions(), *make_optimizer.remarks()]
    if gpu is None or gpu.compute_capability is None:
        assumptions.append("kernels and cuBLAS workspaces as on an NVIDIA GPU of compute capability 8.0 (no GPU named)")
    return Simulation(
        model=summary,
        options={**given, **resolved_options(built, tensors, make_optimizer, given)},
        how=How(
            torch=torch.__version__,
            transformers=transformers.__version__,
            seconds=seconds,
            assumptions=tuple(dict.fromkeys(assumptions)),
            not_modelled=(*workspaces.not_modelled(), *unasked.not_modelled),
        ),
        ranks=tuple(rank for rank, *_ in traced),
        fit=worst.fit_on(gpu),
        unasked=unasked.phases,
        graph=graph,
    )


def check_step(step: StepSpec) -> None:
    """Raise InputError for sizes, names and counts that no step can have."""
    limits = {
        "batch_size": (step.batch_size, MAX_BATCH_SIZE),
        "seq_len": (step.seq_len, MAX_SEQ_LEN),
        "target_len": (step.target_len, MAX_SEQ_LEN),
        "image_size": (step.image_size, 1 << 15),
        "num_images": (step.num_images, 1 << 12),
        "iterations": (step.iterations, 100),
    }
    for name, (value, limit) in limits.items():
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            raise InputError(f"{name} is {value!r}, but has to be a whole number from 1 to {limit}.")
    check_attention(step.attention)
    check_optimizer(step.optimizer)


def _summary(resolved, model, module) -> ModelSummary:
    """The class of the model itself, and the counts of what is trained, adapters included; packed weights unpacked."""
    parameters = list({id(parameter): parameter for parameter in module.parameters()}.values())
    packed = [part for part in module.modules() if hasattr(part, "weight_storage")]
    storages = {id(tensor): tensor for part in packed for tensor in part.storages()}
    plain = [parameter for parameter in parameters if id(parameter) not in storages]
    return ModelSummary(
        id=resolved.id,
        source=resolved.source,
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in plain) + sum(part.weight_numel for part in packed),
        trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in (*plain, *storages.values())),
    )
