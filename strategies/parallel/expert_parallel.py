"""Expert parallelism by transformers itself: whole experts on each rank, tokens that travel to them and back.

What it changes: each of `ep` ranks holds num_experts / ep experts of every layer. Rows of the batch are sent to the
ranks of their experts with an all-to-all and come back with a second one; what comes back is weighted and summed.
Where each byte comes from: transformers' `apply_expert_parallelism` with the model's own `base_model_ep_plan` runs on
the phantom GPU: dispatch and combine buffers, the grouped products and their backward are its own (`AllToAllEP`).
torchtitan's token dispatch, DeepEP and Mega MoE are not modelled.
Load: every rank's batch is routed alike and every expert is chosen equally often; `load_skew` S lets the traced rank
receive S times as many rows as that (tracer/collectives.py, Note [What peers send]).
Sources: transformers 5.24 distributed/expert_parallel.py, distributed/fsdp.py (apply_fully_sharded_data_parallelism).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metapeak.strategies.base import NoOpStrategy
from metapeak.strategies.parallel.layout import NO_LAYOUT, Layout
from metapeak.strategies.parallel.meshes import expert_data_parallel_mesh, expert_mesh, same_batch_mesh
from metapeak.strategies.parallel.plans import parallel_plans
from metapeak.tracer.errors import InputError

if TYPE_CHECKING:
    import torch

_DISPATCH = "ep_dispatch_experts"


@dataclass(frozen=True, kw_only=True)
class ExpertParallel(NoOpStrategy):
    """`load_skew` is the load of the traced rank's experts over the mean of all."""

    layout: Layout = NO_LAYOUT
    load_skew: float = 1.0

    name = "expert parallel"

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module as it is. Raises InputError for one without experts or whose experts cannot be spread."""
        if self.layout.ep > 1:
            self._check(module)
        return module

    def distribute(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module, which is on the device, with its own experts alone."""
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        if self.layout.ep == 1:
            return module
        _, plan = parallel_plans(module, self.layout)
        return apply_expert_parallelism(module, expert_mesh(self.layout)["ep"], same_batch_mesh(self.layout), plan)

    def running(self) -> AbstractContextManager[Any]:
        from metapeak.tracer.collectives import load_skew

        return load_skew(self.load_skew) if self.layout.ep > 1 else nullcontext()

    def notes(self, module: torch.nn.Module) -> tuple[str, ...]:
        if self.layout.ep == 1:
            return ()
        experts = _num_experts(module)
        load = (
            "every expert gets the same number of tokens"
            if self.load_skew == 1
            else f"the experts of the traced rank get {self.load_skew:g} times the mean number of tokens"
        )
        return (
            f"expert parallelism is transformers' own (all-to-all dispatch and combine): {experts} experts / ep "
            f"{self.layout.ep} = {experts // self.layout.ep} experts of each layer a rank; {load}",
        )

    def _check(self, module: torch.nn.Module) -> None:
        ep = self.layout.ep
        if not getattr(module, "ep_plan", None) or hasattr(module, "get_base_model"):
            raise InputError(
                f"ep {ep}: {type(module).__name__} has no expert parallel plan in transformers. It needs a mixture of "
                "experts with base_model_ep_plan; adapters and models of other packages are not spread."
            )
        experts = _num_experts(module)
        if experts % ep:
            divisors = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
            raise InputError(
                f"num_experts {experts} / ep {ep} = {experts / ep:.2f} is no whole number of experts. "
                f"Degrees that divide it: {divisors}."
            )
        chosen = getattr(module.config.get_text_config(), "num_experts_per_tok", None) or 1
        local = experts // ep
        most = experts * min(chosen, local) / (chosen * local)
        if not 1 <= self.load_skew <= most:
            raise InputError(
                f"expert_load_skew is {self.load_skew:g}, but has to lie between 1 and num_experts {experts} x "
                f"min(num_experts_per_tok {chosen}, {local}) / (num_experts_per_tok {chosen} x {local}) = {most:g}: a "
                f"token chooses each of the {local} experts of a rank at most once."
            )


def _num_experts(module: torch.nn.Module) -> int:
    """Experts of each layer. Raises InputError for a model whose modules do not say."""
    names = [name for name, style in module.ep_plan.items() if style == _DISPATCH]
    found = {part.num_experts for name, part in module.named_modules() if _matches(name, names)}
    if len(found) != 1:
        raise InputError(
            f"ep: the experts of {type(module).__name__} are {sorted(found) or 'not found'}, not of a kind."
        )
    return found.pop()


def _matches(name: str, patterns: list[str]) -> bool:
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    return replace_layer_number_by_wildcard(name) in patterns


def expert_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules whose experts are spread; FSDP shards them over other ranks than the rest."""
    return [part for part in module.modules() if getattr(part, "_is_expert_parallel", False)]


def shard_experts(module: torch.nn.Module, layout: Layout, options: dict[str, Any]) -> None:
    """`fully_shard` the spread experts over the ranks that hold the same ones, as transformers does.

    `options` are those of `fully_shard`; the mesh is replaced.
    """
    from torch.distributed.fsdp import fully_shard

    for experts in expert_modules(module):
        fully_shard(experts, reshard_after_forward=True, **{**options, "mesh": expert_data_parallel_mesh(layout)})
        experts.set_gradient_divide_factor(float(layout.dp_replicate * layout.fsdp))
        if layout.efsdp > 1:
            experts.set_force_sum_reduction_for_comms(True)
