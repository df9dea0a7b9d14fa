"""Megatron-LM's data parallelism with its distributed optimizer, over `dp_shard` ranks.

What it changes: parameters lie in one flat buffer and gradients in another, which is float32 and always there;
every rank keeps float32 copies and optimizer states of its part of them.
Where each byte comes from: the rules below are written from Megatron-LM's source (main at 0011998) and act in the
traced step; Megatron itself is not run.
  buffers, padding, views   core/distributed/param_and_grad_buffer.py, _ParamAndGradBuffer.__init__
  gradients added, freed    core/distributed/distributed_data_parallel.py, _make_backward_post_hook
  reduce-scatter, gather    param_and_grad_buffer.py, start_grad_sync and start_param_sync: in place, into views
  float32 copies            core/optimizer/distrib_optimizer.py, _build_model_and_main_param_groups
  the step                  distrib_optimizer.py, _copy_model_grads_to_main_grads, _copy_main_params_to_model_params
Not modelled: several buckets (--overlap-grad-reduce: padding of each), Float16Module's cast of outputs to float32,
Megatron's own model classes and fused kernels, its precision-aware optimizer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metapeak.strategies.base import NoOpStrategy
from metapeak.strategies.parallel.layout import NO_LAYOUT, Layout
from metapeak.tracer.errors import InputError
from metapeak.tracer.liveness import Category
from metapeak.tracer.simulation import Option

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.engine import Engine
    from metapeak.tracer.models import ResolvedModel
    from metapeak.tracer.spec import StepSpec

_PARAMETER_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128


@dataclass(frozen=True, kw_only=True)
class Megatron(NoOpStrategy):
    """`param_dtype` is what the model is cast to (--bf16), None its own; `reduce_dtype` that of the gradient buffer:
    None is float32, bfloat16 --grad-reduce-in-bf16.
    """

    layout: Layout = NO_LAYOUT
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    max_grad_norm: float | None = None

    name = "megatron"

    @property
    def casts_to(self) -> str | None:
        return self.param_dtype

    def check(self, model: ResolvedModel, step: StepSpec) -> None:
        if step.optimizer.name not in ("adam", "adamw"):
            raise InputError(
                f"engine megatron with optimizer {step.optimizer.name}: its distributed optimizer takes Adam only "
                "(core/optimizer/distrib_optimizer.py). Use optimizer adam or adamw."
            )
        if step.optimizer.arguments or step.optimizer.implementation not in (None, "fused"):
            raise InputError("engine megatron steps with FusedAdam: leave out implementation and optimizer_args.")
        if "float16" in (self.param_dtype, self.reduce_dtype):
            raise InputError("engine megatron in fp16: its loss scaling is not predicted. Use bf16-mixed.")

    def notes(self, module: torch.nn.Module) -> tuple[str, ...]:
        frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        if frozen:
            raise InputError(f"engine megatron trains whole models here, but {frozen[0]} is frozen. Use method full.")
        return ()

    def resolved(self, module: torch.nn.Module) -> Mapping[str, Option]:
        return {"implementation": Option(value="fused", origin="Megatron's FusedAdam")}

    def assumptions(self) -> tuple[str, ...]:
        return (
            "Megatron-LM's distributed optimizer, one bucket, by rules from its source; the model is transformers' "
            "own, not Megatron's classes; Adam is TransformerEngine's FusedAdam, in place; rank 0 stands for all, "
            "whose parts differ by padding",
        )

    def engine(
        self, module: torch.nn.Module, make_optimizer: Callable[[list], Any] | None, micro_batches: int
    ) -> AbstractContextManager[Engine]:
        return _rank(module, self, micro_batches)


def buffer_places(sizes: Sequence[int], ranks: int) -> tuple[list[int], int]:
    """(where each parameter begins, elements in all) of a buffer of parameters with these sizes, in their order.

    The last parameter comes first; every one begins at a multiple of 64, and the end is a multiple of 128 and of ranks.

    >>> buffer_places([100, 30], 3)
    ([64, 0], 384)
    """
    places, end = [], 0
    for size in reversed(sizes):
        begin = -(-end // _PARAMETER_ALIGNMENT) * _PARAMETER_ALIGNMENT
        places.append(begin)
        end = begin + size
    divisor = math.lcm(ranks, _BUCKET_ALIGNMENT)
    return places[::-1], -(-end // divisor) * divisor


@contextlib.contextmanager
def _rank(module: torch.nn.Module, strategy: Megatron, micro_batches: int) -> Iterator[MegatronRank]:
    yield MegatronRank(module, strategy, micro_batches)


class MegatronRank:
    """An Engine (see tracer/engine.py)."""

    def __init__(self, module: torch.nn.Module, strategy: Megatron, micro_batches: int):
        import torch

        from metapeak.strategies.optimizers.torch_optim import AdamOfDtype

        self.model = self.module = module
        self._norm, self._micro_batches, self._seen = strategy.max_grad_norm, micro_batches, 0
        self._recorder: Any = None
        self._buffers = []
        for dtype, parameters in _by_dtype(module, strategy.param_dtype).items():
            reduced = getattr(torch, strategy.reduce_dtype or "float32")
            self._buffers.append(_Buffer(parameters, dtype, reduced))
        self._optimizer = AdamOfDtype(
            [main for buffer in self._buffers for _, main in buffer.mains], state_dtype=torch.float32, fused=True
        )
        for buffer in self._buffers:
            for parameter in buffer.parameters:
                parameter.register_post_accumulate_grad_hook(self._accumulate)

    def load(self, recorder: Any) -> None:
        self._recorder = recorder
        for buffer in self._buffers:
            recorder.load(buffer.gradients, "buffer of gradients", Category.GRADIENT)
            for _, main in buffer.mains:
                recorder.load(main, "float32 part", Category.OPTIMIZER_STATE)

    def backward(self, loss: torch.Tensor) -> None:
        import torch.distributed as dist

        if self._seen == 0:
            for buffer in self._buffers:
                buffer.gradients.zero_()
        (loss / self._micro_batches).backward()
        self._seen += 1
        if self._seen == self._micro_batches:
            for buffer in self._buffers:
                buffer.gradients.mul_(1 / buffer.ranks)
                dist.reduce_scatter_single(buffer.own(buffer.gradients), buffer.gradients)

    def step(self) -> None:
        import torch
        import torch.distributed as dist

        from metapeak.tracer.optimizer_states import mark_optimizer_states

        if self._seen < self._micro_batches:
            return
        self._seen = 0
        mains = [(buffer, place, main) for buffer in self._buffers for place, main in buffer.mains]
        for buffer, place, main in mains:  # a view where the buffer is float32
            main.grad = buffer.gradients[place : place + main.numel()].float()
            self._recorder.mark(main.grad, Category.GRADIENT, main)
        if self._norm is not None:
            torch.nn.utils.get_total_norm([main.grad for *_, main in mains], foreach=True)
            for *_, main in mains:
                main.grad.mul_(1.0)
        self._optimizer.step()
        mark_optimizer_states(self._recorder, self._optimizer)
        for buffer, place, main in mains:
            main.grad = None
            with torch.no_grad():
                buffer.weights[place : place + main.numel()].copy_(main)
        for buffer in self._buffers:
            dist.all_gather_single(buffer.weights, buffer.own(buffer.weights))

    def _accumulate(self, parameter: torch.Tensor) -> None:
        self._recorder.mark_unsharded(parameter.grad, Category.GRADIENT, parameter)
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


class _Buffer:
    """One buffer of parameters and one of gradients; `mains` are (place, float32 copy) of this rank's part."""

    def __init__(self, parameters: list[torch.Tensor], dtype: torch.dtype, reduced: torch.dtype):
        import torch
        import torch.distributed as dist

        from metapeak.tracer.phantom import DEVICE

        self.parameters, self.ranks = parameters, dist.get_world_size()
        places, numel = buffer_places([parameter.numel() for parameter in parameters], self.ranks)
        self.weights = torch.zeros(numel, dtype=dtype, device=DEVICE)
        self.gradients = torch.zeros(numel, dtype=reduced, device=DEVICE)
        self._begin = numel // self.ranks * dist.get_rank()
        self._end = self._begin + numel // self.ranks
        self.mains: list[tuple[int, torch.Tensor]] = []
        for parameter, place in zip(parameters, places):
            shape, size = parameter.shape, parameter.numel()
            parameter.data = self.weights[place : place + size].view(shape)
            parameter.main_grad = self.gradients[place : place + size].view(shape)
            begin, end = max(place, self._begin), min(place + size, self._end)
            if begin < end:
                part = self.weights[begin:end].detach()
                self.mains.append((begin, part if dtype is torch.float32 else part.clone().float()))

    def own(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self._begin : self._end]


def _by_dtype(module: torch.nn.Module, cast: str | None) -> dict[torch.dtype, list[torch.Tensor]]:
    """The parameters by the dtype that they have in the buffers."""
    import torch

    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in module.parameters():
        dtype = getattr(torch, cast) if cast is not None else parameter.dtype
        found.setdefault(dtype, []).append(parameter)
    return found
