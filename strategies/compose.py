"""The order in which everything happens, as one straight line: read `simulate` first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from metapeak.strategies.attention import attention_of, check_attention, check_attention_dtype
from metapeak.strategies.base import Strategy
from metapeak.strategies.optimizer import check_optimizer, optimizer_maker
from metapeak.tracer.device.overheads import overheads
from metapeak.tracer.errors import InputError
from metapeak.tracer.gpus import Gpu
from metapeak.tracer.kernels import DEFAULT_COMPUTE_CAPABILITY, NOT_MODELLED, KernelWorkspaces, device_of
from metapeak.tracer.simulation import How, ModelSummary, Option, RankResult, Simulation, verdict_for
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
    options: Mapping[str, Option] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Simulation:
    """Peak memory of one training step of `model`, traced.

    Arguments: a model reference or ModelSpec, the step, strategies, the GPU to judge the result for (it also decides
    kernels and workspaces; without one an NVIDIA GPU of compute capability 8.0 is assumed), the options as their
    caller resolved them (recorded in the result with the origin of each), and a function told what is going on.

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

    started = time.perf_counter()
    progress("importing torch and transformers")
    import torch
    import transformers

    from metapeak.tracer.attention import attention_choice
    from metapeak.tracer.capture import record_training_step
    from metapeak.tracer.flash_attention import flash_attention_2_available
    from metapeak.tracer.models import build, resolve_model

    seconds["import"] = time.perf_counter() - started

    started = time.perf_counter()
    progress(f"building {spec.reference}")
    resolved = resolve_model(spec)
    for strategy in strategies:
        strategy.check(resolved, step)
    capability = compute_capability_of(gpu)
    implementation, choice = attention_of(step.attention, capability)
    with flash_attention_2_available():
        built = build(resolved, dtype=spec.dtype, attention=implementation)
    check_attention_dtype(step.attention, built.dtype)
    # Strategies change the real module before anything is recorded, in the order in which they were given.
    for strategy in strategies:
        strategy.prepare(built.module)
    tensors, batch_notes = _batch(built, resolved, step)
    compute_loss = _loss(built, resolved)
    summary = _summary(resolved, built.module)
    seconds["build"] = time.perf_counter() - started

    started = time.perf_counter()
    with attention_choice(choice), flash_attention_2_available():
        graph, answered = record_training_step(
            built.module,
            tensors,
            optimizer_maker(step.optimizer),
            compute_loss=compute_loss,
            iterations=step.iterations,
            decouple_saves=any(strategy.needs_saves for strategy in strategies),
            progress=progress,
        )
    seconds["trace"] = time.perf_counter() - started

    started = time.perf_counter()
    liveness = graph.liveness()
    for strategy in strategies:
        liveness = strategy.rewrite(liveness, graph)
    # Workspaces last: what the rewritten step runs again takes its workspace again.
    workspaces = KernelWorkspaces.of(graph, device_of(gpu))
    liveness = workspaces.added_to(liveness)
    liveness.lint()
    rank = RankResult(rank=0, count=1, coordinates={}, liveness=liveness, overheads=overheads(gpu))
    seconds["liveness"] = time.perf_counter() - started

    assumptions = [*resolved.notes, *built.notes, *batch_notes, *answered]
    for strategy in strategies:
        assumptions += [*strategy.assumptions(), *strategy.remarks(graph)]
    if gpu is None or gpu.compute_capability is None:
        assumptions.append("kernels and cuBLAS workspaces as on an NVIDIA GPU of compute capability 8.0 (no GPU named)")
    return Simulation(
        model=summary,
        options={**(options or {}), **_resolved_options(built, tensors, options or {})},
        how=How(
            torch=torch.__version__,
            transformers=transformers.__version__,
            seconds=seconds,
            assumptions=tuple(dict.fromkeys(assumptions)),
            not_modelled=(*workspaces.not_modelled(), *NOT_MODELLED),
        ),
        ranks=(rank,),
        fit=verdict_for(gpu, rank.device_range) if gpu else None,
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


def compute_capability_of(gpu: Gpu | None) -> tuple[int, int]:
    """The compute capability whose kernels run: the GPU's, or the default for none and for other vendors."""
    return gpu.compute_capability if gpu and gpu.compute_capability else DEFAULT_COMPUTE_CAPABILITY


def _summary(resolved, module) -> ModelSummary:
    parameters = list({id(parameter): parameter for parameter in module.parameters()}.values())
    return ModelSummary(
        id=resolved.id,
        source=resolved.source,
        architecture=type(module).__name__,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable_parameters=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
    )


def _batch(built, resolved, step: StepSpec) -> tuple[Any, tuple[str, ...]]:
    """(tensors, notes): the user's own batch where the function gave one, else a full batch for the task."""
    if built.batch is not None:
        return built.batch, ("the batch is the one that the function returned; batch_size and lengths are not used",)
    if getattr(built.module, "config", None) is None:
        raise InputError(
            f"{resolved.id} returned a module without a transformers config, so its inputs are not known. "
            "Return (module, batch) or (module, batch, loss function)."
        )
    if resolved.task is None:
        raise InputError(f"{resolved.id}: its task is not known. Give --task, or return (module, batch).")
    from metapeak.tracer.batches import make_batch

    batch = make_batch(built.module, resolved.task, step)
    return batch.tensors, batch.notes


def _loss(built, resolved) -> Callable[..., Any]:
    """The user's loss function, the model's own, or for a model without one the sum of its features (as batches.py says
    in its notes).
    """
    from metapeak.tracer.batches import sum_of_features
    from metapeak.tracer.capture import default_loss

    if built.compute_loss is not None:
        return built.compute_loss
    return sum_of_features if resolved.task == "feature-extraction" and built.batch is None else default_loss


def _resolved_options(built, tensors, given: Mapping[str, Option]) -> dict[str, Option]:
    """Options whose value only the model knows: its dtype, the lengths that its batch got, its attention."""
    resolved: dict[str, Option] = {}

    def fill(name: str, value: Any, origin: str) -> None:
        if value is not None and (name not in given or given[name].value is None):
            resolved[name] = Option(value=value, origin=origin)

    fill("weights_dtype", built.dtype, built.dtype_source)
    if built.batch is not None:
        resolved["batch_size"] = Option(value=None, origin="the function's own batch")
    config = getattr(built.module, "config", None)
    fill("attention", getattr(config, "_attn_implementation", None), "model class")
    for name, value in batch_sizes(tensors).items():
        fill(name, value, "default")
    return resolved


def batch_sizes(tensors: Any) -> dict[str, int]:
    """The lengths of a batch under their option names: tokens, decoder tokens, pixels a side."""
    sizes: dict[str, int] = {}
    if not isinstance(tensors, Mapping):
        return sizes
    for name, option in (("input_ids", "seq_len"), ("decoder_input_ids", "target_len"), ("pixel_values", "image_size")):
        if name in tensors:
            sizes[option] = int(tensors[name].shape[-1])
    if "labels" in tensors and "target_len" not in sizes and tensors["labels"].dim() == 2 and "input_ids" in tensors:
        labels = int(tensors["labels"].shape[-1])
        if labels != sizes["seq_len"]:
            sizes["target_len"] = labels
    return sizes
