"""Evaluation and saving of a job for which nobody asked for them: shown beside the training steps, counted in nothing.

What it changes: nothing in the training steps, their peak and the verdict, which stay about what was asked.
Where each byte comes from: one batch of an evaluation is run behind the steps of the worst rank (tracer/life.py). A
save is run where ranks hold shards, and takes nothing of the device elsewhere: tensors go to the host one by one.
Not modelled: generation, which nobody does by default; a pipeline's or an engine's evaluation, which the report says.
Sources: transformers 5.24 training_args.py (per_device_eval_batch_size 8); accelerate 1.15 utils/dataclasses.py
(FullyShardedDataParallelPlugin: FULL_STATE_DICT under FSDP1, SHARDED_STATE_DICT under FSDP2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metapeak.strategies.lifecycle import EVAL_BATCH_SIZE, Lifecycle, lived_on
from metapeak.tracer.errors import MetapeakError
from metapeak.tracer.simulation import UnaskedPhase

if TYPE_CHECKING:
    from metapeak.strategies.base import Strategy
    from metapeak.tracer.graph import StepGraph
    from metapeak.tracer.liveness import Liveness
    from metapeak.tracer.simulation import Option
    from metapeak.tracer.spec import StepSpec

# Presets of programs that evaluate with transformers' own defaults.
_TRAINERS = (None, "hf-trainer", "trl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unasked:
    """Phases that were not asked for, in order, and what a report has to say about them."""

    phases: tuple[UnaskedPhase, ...] = ()
    assumptions: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()


def unasked_life(
    life: Lifecycle, strategies: Sequence[Strategy], step: StepSpec, options: Mapping[str, Option], *, by_trainer: bool
) -> Lifecycle:
    """What a job does without being told to, as far as `life` does not ask for it.

    `by_trainer`: the model is one that transformers' Trainer evaluates; others evaluate with their training batch.
    """
    preset = options["preset"].value if "preset" in options else None
    usual = EVAL_BATCH_SIZE if by_trainer and preset in _TRAINERS else step.batch_size
    return Lifecycle(
        evaluate=not life.evaluates,
        eval_batches=None if life.evaluates else 1,
        eval_batch_size=life.eval_batch_size or usual,
        save=None if life.save is not None else _usual_save(strategies),
    )


def _usual_save(strategies: Sequence[Strategy]) -> str:
    names = [strategy.name for strategy in strategies]
    if "lora" in names or "qlora" in names:
        return "adapter"
    return "sharded" if "fsdp2" in names else "full"


def unasked_phases(
    unasked: Lifecycle,
    liveness: Liveness,
    strategies: Sequence[Strategy],
    record: Callable[[Lifecycle], tuple[StepGraph, Any]],
    host: Callable[[Lifecycle, int], Mapping[str, Mapping[str, Any]]],
) -> Unasked:
    """The phases of `unasked` behind a rank's `liveness`; what cannot be told is said, never raised.

    `record` runs a life on the module prepared anew, `host` says what lies on the host from its kept bytes.
    """
    names = [name for name, asked in (("evaluation", unasked.evaluates), ("save", unasked.save)) if asked]
    if not names:
        return Unasked()
    words = " and ".join(names)
    for strategy in strategies:
        if strategy.engine is not None or strategy.name == "pipeline parallel":
            return Unasked(not_modelled=(f"{words} under {strategy.name}",))
    shards = any(strategy.layout is not None and strategy.name != "ddp" for strategy in strategies)
    traced = unasked if shards else Lifecycle(**{**_fields(unasked), "save": None})
    peaks, kept = {}, 0
    if traced.after_training:
        try:
            later, _ = record(traced)
            whole = lived_on(liveness, later, strategies)
        except MetapeakError as error:
            return Unasked(not_modelled=(f"{words}, which were not asked for: {error}",))
        peaks = {phase.phase: (phase.peak_bytes, phase.end_bytes) for phase in whole.phases()[len(liveness.phases()) :]}
        kept, end = later.host_bytes, whole.bytes_before(whole.num_ops)
    else:
        end = liveness.bytes_before(liveness.num_ops)
    if unasked.save is not None and "save" not in peaks:
        peaks["save"] = (end, end)
    rows = host(unasked, kept)
    return Unasked(
        phases=tuple(
            UnaskedPhase(phase=name, peak_bytes=peak, end_bytes=left, host_bytes=rows.get(name, _NOTHING)["host_bytes"])
            for name, (peak, left) in peaks.items()
        ),
        assumptions=(_said(unasked, words),),
    )


_NOTHING = {"host_bytes": 0}


def _fields(life: Lifecycle) -> dict[str, Any]:
    return {name: getattr(life, name) for name in life.__slots__}


def _said(unasked: Lifecycle, words: str) -> str:
    said = []
    if unasked.evaluates:
        default = unasked.eval_batch_size == EVAL_BATCH_SIZE
        why = " (the Hugging Face Trainer's default, --eval-batch-size)" if default else ""
        said.append(f"a batch of {unasked.eval_batch_size}{why}, only its loss kept")
    if unasked.save is not None:
        said.append(f"save {unasked.save}")
    return f"{words} as they are by default: {', '.join(said)}; not counted in the peak unless asked for"
