"""Lion as the package lion-pytorch has it, without the package.

What it changes: the optimizer of the step. (`lion32bit` and `lion8bit` are bitsandbytes' Lion.)
Where each byte comes from: one moment in the parameter's dtype; for each parameter in turn a copy of the moment, the
sign of its sum with the gradient, and while that is made both. `fused` is the package's Triton kernel: in place.
Not modelled: nothing known. Source: lion_pytorch/lion_pytorch.py, lion_pytorch/triton.py.
"""

from __future__ import annotations

from typing import Any

import torch

from metapeak.strategies.optimizers.kernel import update_in_place
from metapeak.strategies.optimizers.recipe import Recipe as BaseRecipe
from metapeak.strategies.optimizers.recipe import call, check_arguments
from metapeak.strategies.optimizers.registry import FUSED
from metapeak.strategies.optimizers.roles import Role


class Recipe(BaseRecipe):
    def __init__(self, **fields: Any):
        super().__init__(**fields)
        check_arguments("lion", Lion, self.arguments)

    def make(self, roles: list[Role]) -> Lion:
        arguments = {"fused": self.implementation == FUSED, **self.arguments}
        return call("lion", Lion, [role.parameter for role in roles], **arguments)


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated moment. `decoupled_weight_decay` changes no byte."""

    def __init__(
        self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, decoupled_weight_decay=False, *, fused=False
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.fused = fused

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                if self.fused:
                    update_in_place("lion", parameter, [state["exp_avg"]])
                else:
                    _update(parameter, parameter.grad, state["exp_avg"], group)


def _update(parameter, grad, moment, group) -> None:
    """One parameter's step; the update dies when it returns."""
    beta1, beta2 = group["betas"]
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    update = moment.clone().mul_(beta1).add(grad, alpha=1 - beta1).sgn_()
    parameter.add_(update, alpha=-group["lr"])
    moment.mul_(beta2).add_(grad, alpha=1 - beta2)
