"""From an OptimizerSpec to a function that makes the optimizer for given parameters."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from metapeak.strategies.optimizers.registry import NONE, find
from metapeak.tracer.spec import OptimizerSpec

if TYPE_CHECKING:
    import torch


def check_optimizer(spec: OptimizerSpec) -> None:
    """Raise UnknownName or InputError for a name, implementation or state dtype that does not exist. No torch here."""
    find(spec)


def optimizer_maker(spec: OptimizerSpec, model: torch.nn.Module | None = None) -> OptimizerMaker | None:
    """A function from parameters to the optimizer; None for the optimizer `none`, which is no step at all.

    `model` is the module whose parameters these will be: names and roles (an embedding, the head) are looked up in it.
    Raises as `check_optimizer`, and InputError for a class that cannot be imported or does not take the arguments.
    """
    entry, _ = find(spec)
    return None if entry.library == NONE else OptimizerMaker(spec, model)


class OptimizerMaker:
    """Makes optimizers of one kind: `make(parameters)`, as often as wanted (one for each parameter, for example).

    `implementation` is the one that runs. `assumptions()` are sentences that every report prints, `remarks()` those
    that the optimizers made so far give rise to.
    """

    def __init__(self, spec: OptimizerSpec, model: torch.nn.Module | None = None):
        entry, implementation = find(spec)
        library = importlib.import_module(f"metapeak.strategies.optimizers.{entry.library}")
        self.recipe = library.Recipe(
            class_name=entry.class_name,
            implementation=implementation,
            arguments=dict(entry.arguments),
            state_dtype=spec.state_dtype,
        )
        self._model = model

    @property
    def implementation(self) -> str:
        return self.recipe.implementation

    def __call__(self, parameters: Iterable[torch.Tensor | tuple[str, torch.Tensor]]) -> Any:
        """The optimizer of these parameters, tensors or (name, tensor) pairs.

        It has `param_groups`, `state`, `step()` and `zero_grad()` as a torch.optim.Optimizer. Names that are given win
        over those that the model knows: a master weight takes its parameter's.
        """
        from metapeak.strategies.optimizers.roles import with_roles

        return self.recipe.make(with_roles(parameters, self._model))

    def assumptions(self) -> tuple[str, ...]:
        return self.recipe.assumptions()

    def remarks(self) -> tuple[str, ...]:
        return self.recipe.remarks()
