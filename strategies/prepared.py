"""A module prepared for its step, and what a recording of it gives: what `compose.simulate` asks for, rank by rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from metapeak.strategies.attention import attention_of, check_attention_dtype
from metapeak.strategies.base import Strategy
from metapeak.strategies.lifecycle import (
    Lifecycle,
)
from metapeak.strategies.master_weights import with_master_weights
from metapeak.strategies.optimizers import OptimizerMaker, optimizer_maker
from metapeak.strategies.packages import for_package, optimised_only
from metapeak.strategies.parallel.pipeline import pipeline_of
from metapeak.strategies.parallel.ranks import (
    distribution,
    engine_of,
    process_group_of,
)
from metapeak.strategies.parallel.tensor_parallel import sharded_and_whole_apart
from metapeak.strategies.precision import precision_notes, training_loop
from metapeak.strategies.quantization.from_config import with_checkpoint_quantization
from metapeak.tracer.errors import InputError
from metapeak.tracer.gpus import Gpu
from metapeak.tracer.kernels import DEFAULT_COMPUTE_CAPABILITY
from metapeak.tracer.spec import ModelSpec, StepSpec


@dataclass(kw_only=True, eq=False)
class Prepared:
    """A module on meta with everything that its step needs; `notes` are the report's sentences on how it was made.

    `repeats`: the blocks of it that need no recording; `again` prepares another one, as a recording uses it up.
    """

    built: Any
    module: Any
    tensors: Any
    compute_loss: Callable[..., Any]
    make_optimizer: OptimizerMaker | None
    loop: Any
    choice: Any
    notes: tuple[str, ...]
    repeats: tuple[Any, ...]
    again: Callable[[], Prepared]


def set_up(resolved, spec: ModelSpec, step: StepSpec, strategies: Sequence[Strategy], gpu: Gpu | None) -> Prepared:
    """Build the model anew, with its batch, and let the strategies change it."""
    from metapeak.tracer.depth import repeats_of
    from metapeak.tracer.flash_attention import flash_attention_2_available
    from metapeak.tracer.models import build

    implementation, choice = attention_of(step.attention, compute_capability_of(gpu))
    with flash_attention_2_available():
        built = build(resolved, dtype=spec.dtype, attention=implementation)
    casts = [step.autocast, *(strategy.casts_to for strategy in strategies)]
    check_attention_dtype(step.attention, next((dtype for dtype in casts if dtype is not None), built.dtype))
    pipeline = pipeline_of(strategies)
    tensors, batch_notes = _batch(built, resolved, pipeline.whole_batch(step) if pipeline else step)
    if pipeline:
        tensors = pipeline.batch(tensors)
    compute_loss, own_loss = _loss(built, resolved, strategies), _ends_after_loss(built)
    # Strategies change the real module before anything is recorded, in the order in which they were given. What they
    # return may be a wrapper around it; the batch is made for the model itself.
    module = built.module
    for strategy in strategies:
        module = strategy.prepare(module)
    return Prepared(
        built=built,
        module=module,
        tensors=tensors,
        compute_loss=compute_loss,
        make_optimizer=optimizer_maker(step.optimizer, module),
        loop=training_loop(step, module, own_loss=own_loss),
        choice=choice,
        notes=(
            *built.notes,
            *(built.package.notes(module) if built.package else ()),
            *batch_notes,
            *precision_notes(step, module, gpu, own_loss=own_loss, engine=engine_of(strategies) is not None),
        ),
        repeats=repeats_of(module) if _in_depth(resolved, step, pipeline) else (),
        again=functools.partial(set_up, resolved, spec, step, strategies, gpu),
    )


def _in_depth(resolved, step: StepSpec, pipeline) -> bool:
    """Whether repeated blocks may be left out: in models whose code is known not to ask for one by its number."""
    known = resolved.factory is None and resolved.package is None and not resolved.remote_code
    return known and not step.full_trace and pipeline is None


def trace(prepared: Prepared, step: StepSpec, strategies, layout, rank: int, progress, decouple_saves: bool = False):
    """(graph, assumptions) of the prepared step, recorded as one rank of the layout: its repeated blocks a few times if
    that tells the rest, else all of them.
    """
    return _recorded(
        prepared, functools.partial(_record, step, strategies, layout, rank, progress, decouple_saves), strategies
    )


def _recorded(prepared: Prepared, record: Callable[[Prepared], Any], strategies: Sequence[Strategy]):
    """What `record(prepared)` returns, with the repeated blocks recorded a few times if that tells the rest."""
    from metapeak.tracer.depth import recorded_in_depth

    if prepared.repeats and engine_of(strategies) is None:  # an engine puts the parameters of all blocks together
        recorded = recorded_in_depth(prepared.module, prepared.repeats, functools.partial(record, prepared))
        if recorded is not None:
            return recorded
        prepared = prepared.again()
    return record(prepared)


def _record(step: StepSpec, strategies, layout, rank: int, progress, decouple_saves: bool, prepared: Prepared):
    from metapeak.tracer.capture import record_training_step

    module, make, loop = prepared.module, prepared.make_optimizer, prepared.loop
    pipeline, tensors = pipeline_of(strategies) if layout is not None else None, prepared.tensors
    if pipeline is not None:
        tensors = {name: tensor[: pipeline.count * step.batch_size] for name, tensor in tensors.items()}
        loop = pipeline.loop(loop, module, tensors, strategies)
        module = pipeline.local_stages(module, rank)
        make = optimizer_maker(step.optimizer, module)
    if make is not None and layout is not None:
        make = sharded_and_whole_apart(make)
    if step.optimizer.master_weights:
        make = with_master_weights(make, module)
    make = optimised_only(prepared.built.package, make, module)
    with _around(prepared, strategies, layout, rank):
        return record_training_step(
            module,
            tensors,
            make,
            compute_loss=prepared.compute_loss,
            distribute=distribution(layout, strategies),
            make_engine=engine_of(strategies),
            iterations=step.iterations,
            loop=loop,
            decouple_saves=decouple_saves or any(strategy.needs_saves for strategy in strategies),
            progress=progress,
        )


def plain_step_graph(spec: ModelSpec, step: StepSpec, strategies: Sequence[Strategy] = ()):
    """The step on one GPU with what autograd saves apart, as rewrites take it. Raises as `simulate`."""
    from metapeak.tracer.models import resolve_model

    resolved = resolve_model(spec)
    strategies, _ = with_checkpoint_quantization(resolved, for_package(resolved, strategies))
    prepared = set_up(resolved, spec, step, strategies, None)
    return trace(prepared, step, strategies, None, 0, lambda what: None, decouple_saves=True)[0]


def trace_life(life: Lifecycle, prepared: Prepared, resolved, step: StepSpec, strategies, layout, rank, progress):
    """(graph, assumptions) of what follows training, on the module prepared anew."""
    return _recorded(
        prepared, functools.partial(_record_life, life, resolved, step, strategies, layout, rank, progress), strategies
    )


def _record_life(life: Lifecycle, resolved, step: StepSpec, strategies, layout, rank: int, progress, prepared):
    from metapeak.tracer.life import record_life

    batch = _batch(prepared.built, resolved, replace(step, batch_size=life.sequences))[0]
    with _around(prepared, strategies, layout, rank):
        return record_life(
            prepared.module,
            life.life(),
            batch=batch,
            prompt=life.prompt(prepared.built, resolved, batch),
            compute_loss=prepared.compute_loss,
            distribute=distribution(layout, strategies),
            loop=prepared.loop,
            iteration=step.iterations,
            progress=progress,
        )


@contextlib.contextmanager
def _around(prepared: Prepared, strategies: Sequence[Strategy], layout, rank: int) -> Iterator[None]:
    """What a recording of the prepared module runs in: its attention, its strategies, and its rank's process group."""
    from metapeak.tracer.attention import attention_choice
    from metapeak.tracer.flash_attention import flash_attention_2_available

    with contextlib.ExitStack() as inside:
        inside.enter_context(attention_choice(prepared.choice))
        inside.enter_context(flash_attention_2_available())
        inside.enter_context(process_group_of(layout, rank))
        for strategy in strategies:
            inside.enter_context(strategy.running())
        yield


def plain_graph(resolved, spec: ModelSpec, step: StepSpec, gpu: Gpu | None, strategies: Sequence[Strategy]):
    """One iteration on one GPU, recorded for rewrites: what a checkpointing policy is asked about."""
    step = replace(step, iterations=1)
    prepared = set_up(resolved, spec, step, strategies, gpu)
    return trace(prepared, step, strategies, None, 0, lambda what: None)[0]


def compute_capability_of(gpu: Gpu | None) -> tuple[int, int]:
    """The compute capability whose kernels run: the GPU's, or the default for none and for other vendors."""
    return gpu.compute_capability if gpu and gpu.compute_capability else DEFAULT_COMPUTE_CAPABILITY


def _batch(built, resolved, step: StepSpec) -> tuple[Any, tuple[str, ...]]:
    """(tensors, notes): the user's own batch where the function gave one, else a full batch for the task."""
    if built.package is not None:
        inputs = built.package.batch(built.module, step)
        built.package.prepare_for(built.module, step)
        return inputs.tensors, inputs.notes
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


def _loss(built, resolved, strategies: Sequence[Strategy]) -> Callable[..., Any]:
    """The user's loss function, the model's own, or for a model without one the sum of its features (as batches.py says
    in its notes). Strategies may then decide what of it lives on.
    """
    from metapeak.tracer.batches import sum_of_features
    from metapeak.tracer.capture import default_loss

    if built.compute_loss is not None:
        compute_loss = built.compute_loss
    else:
        features = resolved.task == "feature-extraction" and built.batch is None
        compute_loss = sum_of_features if features else default_loss
    for strategy in strategies:
        compute_loss = strategy.loss_function(compute_loss)
    return compute_loss


def _ends_after_loss(built) -> bool:
    """Whether autocast ends with the loss unless it is told otherwise: where the model does not compute it itself."""
    return built.package.autocast_region == "loss" if built.package else built.compute_loss is not None
