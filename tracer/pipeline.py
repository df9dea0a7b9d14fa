"""A training loop around a pipeline: one rank runs its stages in the order of a real schedule of torch.

torch.distributed.pipelining does everything: it cuts the batch into microbatches, makes the buffers for what neighbours
send, and decides what runs when and what is kept. Neighbours send nothing here; what comes from them has a shape.

Note [What is noted]
    Where each action begins (`StepGraph.actions`). An action ends where the next begins: the loss of a forward, the
    gathers before a stage and what is freed in between belong to the action before.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from metapeak.tracer.errors import InputError
from metapeak.tracer.liveness import Category, Phase
from metapeak.tracer.optimizer_states import mark_optimizer_states
from metapeak.tracer.phantom import DEVICE, DEVICE_NAME
from metapeak.tracer.recorder import Recorder
from metapeak.tracer.training_loop import (
    TrainingLoop,
    autocast_forward,
    mark_gradient,
    noting_outputs,
    when_gradients_come,
)


class LocalStages(nn.Module):
    """The stages of one rank, as `stageN`; it is never called itself."""

    def __init__(self, modules: dict[int, nn.Module]):
        super().__init__()
        self.indices = tuple(modules)
        for index, module in modules.items():
            self.add_module(f"stage{index}", module)

    def __getitem__(self, index: int) -> nn.Module:
        return getattr(self, f"stage{index}")

    def each(self, change: Callable[[nn.Module], nn.Module]) -> LocalStages:
        """Every stage replaced by what `change` makes of it."""
        for index in self.indices:
            setattr(self, f"stage{index}", change(self[index]))
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """How the stages of a rank work together.

    `schedule` is torch's class or one like it, `num_stages` those of all ranks, `microbatches` those of a step.
    `boundary`: shape and dtype of the hidden states between stages, as a rank has them; `logits` of what the last
    returns. `tokens` is the shape of a microbatch's ids. `loss` computes the loss of (logits, targets). `group` makes
    the process group, inside the world's. `part_of` makes a rank's part of the batch: ids, the `targets` of the loss,
    and whatever every stage is given beside its input.
    """

    schedule: type
    num_stages: int
    microbatches: int
    boundary: tuple[tuple[int, ...], torch.dtype]
    logits: tuple[tuple[int, ...], torch.dtype]
    tokens: tuple[int, ...]
    loss: Callable[[Any, Any], torch.Tensor]
    group: Callable[[], Any]
    part_of: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]

    def schedule_of(self, local: LocalStages) -> Any:
        """torch's schedule over the stages of this rank. Raises ValueError as its class does."""
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import PipelineScheduleSingle

        shape, dtype = self.boundary
        hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(self.tokens, dtype=torch.int64, device="meta")
        stages = [
            PipelineStage(
                local[index],
                index,
                self.num_stages,
                DEVICE,
                input_args=hidden if index else tokens,
                output_args=hidden if index < self.num_stages - 1 else self._logits(),
                group=self.group(),
            )
            for index in local.indices
        ]
        single = issubclass(self.schedule, PipelineScheduleSingle)
        return self.schedule(stages[0] if single else stages, self.microbatches, loss_fn=self.loss)

    def _logits(self) -> torch.Tensor:
        shape, dtype = self.logits
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    def step(self, schedule: Any, local: LocalStages, batch: dict[str, torch.Tensor]) -> None:
        """One step of all microbatches. The batch is on every rank; the first stage reads ids, the last labels."""
        first, last = 0 in local.indices, self.num_stages - 1 in local.indices
        given = dict(self.part_of(batch))
        ids, targets = given.pop("input_ids"), given.pop("targets")
        schedule.step(
            *((ids,) if first else ()),
            **given,
            target=targets if last else None,
            losses=[] if last else None,
            return_outputs=False,
        )


@dataclass(frozen=True, kw_only=True)
class PipelineLoop(TrainingLoop):
    """A training loop whose forward and backward are a pipeline's."""

    pipeline: Pipeline = field(kw_only=True)

    def run(
        self,
        recorder: Recorder,
        model: LocalStages,
        batches: Sequence[Any],
        make_optimizer,
        compute_loss,
        iterations: int,
        progress: Callable[[str], None],
    ) -> None:
        """Train as TrainingLoop does; `compute_loss` is not used, the pipeline has its own."""
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with contextlib.ExitStack() as around:
            around.enter_context(when_gradients_come(trainable, lambda parameter: mark_gradient(recorder, parameter)))
            optimizer = self._optimizer(recorder, trainable, make_optimizer, around)
            scaler = torch.amp.GradScaler(DEVICE_NAME, enabled=False)
            for index in model.indices:
                around.enter_context(noting_outputs(recorder, model[index]))
                if self.autocast is not None and self.autocast_region == "forward":
                    around.enter_context(autocast_forward(model[index], self.autocast))
            around.enter_context(without_neighbours())
            schedule = self.pipeline.schedule_of(model)
            actions = _Actions(recorder, schedule, self.pipeline)
            for iteration in range(1, iterations + 1):
                actions.iteration = iteration
                with recorder.phase(Phase.FORWARD, iteration), self._autocast_loss():
                    progress(f"iteration {iteration}: {self.pipeline.microbatches} microbatches")
                    actions.start()
                    self.pipeline.step(schedule, model, batches[0])
                    for parameter in trainable:
                        mark_gradient(recorder, parameter)
                with recorder.phase(Phase.OPTIMIZER, iteration):
                    actions.end()
                    if optimizer is None:
                        model.zero_grad(set_to_none=True)
                        continue
                    progress(f"iteration {iteration}: optimizer")
                    self._step(recorder, optimizer, scaler)
                    mark_optimizer_states(recorder, optimizer)
                    optimizer.zero_grad(set_to_none=True)
            recorder.close()


class _Actions:
    """Notes where the actions of a schedule begin, and which phase they are."""

    def __init__(self, recorder: Recorder, schedule: Any, pipeline: Pipeline):
        self.recorder, self.pipeline, self.iteration = recorder, pipeline, 0
        self._marked: set[int] = set()
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            self._watch(stage)

    def start(self) -> None:
        """Before the first action of a step."""
        self._begin("start", -1, -1)

    def end(self) -> None:
        """After the last action of a step."""
        self._begin("end", -1, -1)

    def _begin(self, kind: str, stage: int, microbatch: int) -> None:
        begin = self.recorder.mark_instant(f"pipeline.{kind}")
        self.recorder.graph.actions.append([self.iteration, kind, stage, microbatch, begin])

    def _watch(self, stage: Any) -> None:
        index = stage.stage_index
        forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
        weight, reduce = stage.backward_weight_one_chunk, stage.perform_reduce_grad

        def forward_one_chunk(microbatch, *args, **kwargs):
            self._mark_buffers(stage)
            with self.recorder.phase(Phase.FORWARD, self.iteration):
                self._begin("F", index, microbatch)
                try:
                    output = forward(microbatch, *args, **kwargs)
                except RuntimeError as error:  # torch says where it was and hides what it was
                    raise error.__cause__ or error from None
            self._check(index, output)
            return output

        def backward_one_chunk(microbatch, *args, full_backward=True, **kwargs):
            with self.recorder.phase(Phase.BACKWARD, self.iteration):
                self._begin("B" if full_backward else "I", index, microbatch)
                return backward(microbatch, *args, full_backward=full_backward, **kwargs)

        def backward_weight_one_chunk(microbatch, *args, **kwargs):
            with self.recorder.phase(Phase.BACKWARD, self.iteration):
                self._begin("W", index, microbatch)
                return weight(microbatch, *args, **kwargs)

        def perform_reduce_grad(*args):
            with self.recorder.phase(Phase.BACKWARD, self.iteration):
                self._begin("R", index, -1)
                return reduce(*args)

        stage.forward_one_chunk, stage.backward_one_chunk = forward_one_chunk, backward_one_chunk
        stage.backward_weight_one_chunk, stage.perform_reduce_grad = backward_weight_one_chunk, perform_reduce_grad

    def _mark_buffers(self, stage: Any) -> None:
        """What neighbours send into is communication; there is one for every microbatch, made at the first step."""
        if stage.stage_index in self._marked:
            return
        self._marked.add(stage.stage_index)
        for infos in (stage.args_recv_info, stage.grad_recv_info):
            for microbatch, info in ((number, info) for number, several in infos.items() for info in several):
                if info.buffer is not None:
                    row = self.recorder.mark(info.buffer, Category.COMMUNICATION, None)
                    self.recorder.graph.boundary_buffers.append([row, microbatch])

    def _check(self, index: int, output: torch.Tensor) -> None:
        """The hidden states have to be what the next stage made buffers for."""
        if index == self.pipeline.num_stages - 1:
            return
        shape, dtype = self.pipeline.boundary
        if tuple(output.shape) != shape or output.dtype != dtype:
            raise InputError(
                f"stage {index} returns {tuple(output.shape)} in {output.dtype}, but stages were expected to send "
                f"{shape} in {dtype}: this model is not cut into stages."
            )


@contextlib.contextmanager
def without_neighbours() -> Iterator[None]:
    """Sends and receives are done when they are asked for; the vote on how shapes are learned is unanimous."""

    def each(operations):
        return [one.op(one.tensor, group=one.group, tag=one.tag, **_peer(one)) for one in operations]

    def _peer(one):
        return {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}

    log = logging.getLogger("torch.distributed.pipelining")
    level = log.level
    log.setLevel(logging.CRITICAL)  # on an error it prints the whole schedule
    try:
        with (
            mock.patch.object(dist, "batch_isend_irecv", each),
            mock.patch.object(dist, "recv", lambda tensor, *args, **kwargs: tensor.fill_(1)),
        ):
            yield
    finally:
        log.setLevel(level)
