"""Pipeline parallelism of torch: stages on ranks, microbatches through them in the order of a schedule.

What it changes: a rank holds its stages alone, receives and sends hidden states and their gradients, and keeps what
backward needs of every microbatch in flight.
Where each byte comes from: torch's own PipelineStage and schedule classes run on the phantom GPU, as one rank.
Not modelled: that NCCL may hold a sent tensor a little longer than the call that sends it.
Sources: torch 2.13 distributed/pipelining (stage.py, schedules.py), torchtitan distributed/pipeline_parallel.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from metapeak.strategies.base import NoOpStrategy, Strategy
from metapeak.strategies.parallel.layout import NO_LAYOUT, Layout
from metapeak.strategies.parallel.meshes import layout_mesh
from metapeak.strategies.parallel.schedules import ONE_FORWARD_ONE_BACKWARD, Schedule
from metapeak.tracer.errors import InputError

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.models import ResolvedModel
    from metapeak.tracer.pipeline import LocalStages, PipelineLoop
    from metapeak.tracer.spec import StepSpec
    from metapeak.tracer.training_loop import TrainingLoop


@dataclass(frozen=True, kw_only=True)
class PipelineParallel(NoOpStrategy):
    """`microbatches` None is as many as there are stages. `split`: first blocks of later stages (stages.py).

    `own` are the blocks of the stages of one rank, in place of a split: that rank alone is traced.
    """

    layout: Layout = NO_LAYOUT
    schedule: Schedule = ONE_FORWARD_ONE_BACKWARD
    microbatches: int | None = None
    split: tuple[str, ...] | None = None
    own: Mapping[int, range] | None = None

    name = "pipeline parallel"

    @property
    def num_stages(self) -> int:
        return self.layout.pp * self.schedule.virtual

    @property
    def count(self) -> int:
        """Microbatches of a step."""
        return self.microbatches or self.num_stages

    def check(self, model: ResolvedModel, step: StepSpec) -> None:
        if model.task != "causal-lm" or model.factory is not None or model.package is not None or model.remote_code:
            raise InputError(f"pp {self.layout.pp}: only causal language models of transformers are cut into stages.")
        if step.grad_accum > 1:
            raise InputError(
                f"grad_accum {step.grad_accum} with pp {self.layout.pp}: the microbatches of a pipeline are its "
                f"accumulation. Use microbatches {step.grad_accum * self.count}."
            )
        if step.autocast == "float16":
            raise InputError("autocast fp16 with pp: torch's schedules run backward themselves, without loss scaling.")
        if step.optimizer.implementation == "in-backward":
            raise InputError(
                "implementation in-backward with pp: gradients of all microbatches are added up before a step "
                "(torchtitan refuses it too)."
            )
        self.schedule.check(self.layout.pp, self.count)

    def notes(self, module: torch.nn.Module) -> tuple[str, ...]:
        ranges, said = self._ranges(module)
        model = _model_in(module)
        head = getattr(model.get_output_embeddings(), "weight", 0)
        tied = model.get_input_embeddings().weight is head
        return (
            "stages have blocks " + ", ".join(_text(one) for one in ranges),
            *said,
            *(("the tied embedding is on the first and the last stage, each with a copy of its own",) if tied else ()),
        )

    def assumptions(self) -> tuple[str, ...]:
        cut = (
            "every rank cuts its parts of ids, shifted labels and positions out of the step's batch before the "
            "schedule begins, and every stage is given the positions; parts of the sequence go between stages",
        )
        order = (
            "the order of actions is Megatron-LM's (megatron/core/pipeline_parallel/schedules.py), its stages are run "
            "by torch's runtime: Megatron receives into new buffers, torch into one that it keeps for every microbatch",
        )
        return (
            *(order if self.schedule.is_megatron else ()),
            *(cut if self.layout.cp > 1 else ()),
            f"a step is {self.count} microbatches of batch_size; its ids and labels lie on every rank's GPU together, "
            "without an attention mask (samples are full)",
            "torch's PipelineStage is told the shapes between stages; it makes a buffer for every microbatch's hidden "
            "states and gradients at the first step and keeps them",
            "the last stage returns logits, which are kept until their backward; losses are the model's own, scaled by "
            "the schedule; one optimizer steps all stages of a rank",
        )

    def _ranges(self, module: torch.nn.Module) -> tuple[list[range], tuple[str, ...]]:
        from metapeak.strategies.parallel.stages import StageParts, split_blocks

        parts = StageParts.of(_model_in(module))
        split = [entry.removeprefix(_prefix_in(module)) for entry in self.split] if self.split else None
        return split_blocks(parts.blocks, self.num_stages, split)

    def blocks(self, module: torch.nn.Module) -> tuple[tuple[str, ...], list[range]]:
        """(paths of all blocks, numbers of those of every stage)."""
        from metapeak.strategies.parallel.stages import StageParts

        return StageParts.of(_model_in(module)).blocks, self._ranges(module)[0]

    def whole_batch(self, step: StepSpec) -> StepSpec:
        """The step with the batch of all microbatches, which the schedule cuts."""
        return replace(step, batch_size=step.batch_size * self.count)

    def batch(self, tensors: Any) -> dict[str, torch.Tensor]:
        """Ids and labels of the batch. Raises InputError for one that has more than that and a mask."""
        more = set(tensors) - {"input_ids", "labels", "attention_mask"}
        if more:
            raise InputError(
                f"pp: stages are given token ids and labels, but this model takes {', '.join(sorted(more))}."
            )
        return {name: tensors[name] for name in ("input_ids", "labels")}

    def local_stages(self, module: torch.nn.Module, rank: int) -> LocalStages:
        """The stages of a rank of the layout, on meta, copied from the whole module."""
        from metapeak.strategies.parallel.stages import stage_module
        from metapeak.tracer.pipeline import LocalStages

        model, ranges = _model_in(module), self.own or self._ranges(module)[0]
        place = self.layout.coordinates(rank)["pp"]
        return LocalStages(
            {
                stage: stage_module(model, ranges[stage], stage, self.num_stages)
                for stage in self.schedule.stages_of(place, self.layout.pp)
            }
        )

    def loop(
        self,
        loop: TrainingLoop,
        module: torch.nn.Module,
        batch: dict[str, torch.Tensor],
        strategies: Sequence[Strategy],
    ) -> PipelineLoop:
        """The loop around this pipeline, for a batch of all microbatches."""
        from metapeak.tracer.pipeline import Pipeline, PipelineLoop

        model = _model_in(module)
        config = model.config.get_text_config()
        samples, tokens = batch["input_ids"].shape
        size = (samples // self.count, tokens // self.layout.cp)
        parts = self.layout.tp if any(getattr(one, "sequence_parallel", False) for one in strategies) else 1
        dtype = _boundary_dtype(model, loop, strategies)
        part_of = _part_of(strategies)

        def loss(logits, targets):
            given = {"labels": targets} if self.layout.cp == 1 else {"labels": None, "shift_labels": targets}
            return model.loss_function(logits=logits, **given, vocab_size=config.vocab_size)

        pipeline = Pipeline(
            schedule=self.schedule.kind,
            num_stages=self.num_stages,
            microbatches=self.count,
            boundary=((size[0], size[1] // parts, config.hidden_size), dtype),
            logits=((*size, config.vocab_size), dtype),
            tokens=size,
            loss=loss,
            group=lambda: layout_mesh(self.layout)["pp"].get_group(),
            part_of=lambda batch: part_of(model, batch),
        )
        plain = {one.name: getattr(loop, one.name) for one in dataclasses.fields(loop)}
        return PipelineLoop(**plain, pipeline=pipeline)


def pipeline_of(strategies: Sequence[Strategy]) -> PipelineParallel | None:
    """The pipeline among the strategies, if there is one."""
    return next((strategy for strategy in strategies if isinstance(strategy, PipelineParallel)), None)


def balance(peaks: Sequence[tuple[int, int]]) -> float:
    """Largest over mean of (peak, ranks) pairs: what perfectly even stages would save is 1 - 1 / this.

    >>> balance([(3, 1), (1, 1)])
    1.5
    """
    total = sum(peak * count for peak, count in peaks)
    ranks = sum(count for _, count in peaks)
    return max(peak for peak, _ in peaks) * ranks / total if total else math.nan


def _model_in(module: torch.nn.Module) -> torch.nn.Module:
    """The model of transformers: the module itself, or what PEFT wraps."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def _prefix_in(module: torch.nn.Module) -> str:
    model = _model_in(module)
    return next(name + "." if name else "" for name, part in module.named_modules() if part is model)


def _boundary_dtype(model: torch.nn.Module, loop: TrainingLoop, strategies: Sequence[Strategy]) -> torch.dtype:
    """The dtype of hidden states between stages; a run that makes another one is refused (tracer/pipeline.py)."""
    import torch

    cast = next((strategy for strategy in strategies if strategy.casts_to is not None), None)
    output = next((dtype for strategy in strategies if (dtype := getattr(strategy, "output_dtype", None))), None)
    if output is not None:
        return getattr(torch, output)
    if loop.autocast is not None and loop.autocast_region == "forward":
        return torch.float32  # accelerate's conversion of what a forward returns
    return getattr(torch, cast.casts_to) if cast is not None else model.get_input_embeddings().weight.dtype


def _part_of(strategies: Sequence[Strategy]) -> Callable[..., dict[str, torch.Tensor]]:
    """What a rank's stages are given of (model, batch): what the strategies make of it before they call a model.

    Parts of a sequence come with their labels shifted already, and with positions that every stage has to know.
    """

    def compute(model, batch):
        labels = batch.get("shift_labels", batch["labels"])
        positions = {name: batch[name] for name in ("position_ids",) if name in batch}
        return {"input_ids": batch["input_ids"], "targets": labels, **positions}

    for strategy in strategies:
        compute = strategy.loss_function(compute)
    return compute


def _text(blocks: range) -> str:
    return str(blocks[0]) if len(blocks) == 1 else f"{blocks[0]}-{blocks[-1]}"
