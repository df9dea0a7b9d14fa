"""Classes of torch.optim, run for real in the implementation that CUDA picks or that is asked for.

What it changes: nothing, the class itself is traced.
Where each byte comes from: the class's own operators. foreach works on lists of tensors, so its temporaries are lists:
AdamW's square roots are one more copy of its moments' size. A fused kernel has no temporaries, and the for-loop those
of one tensor at a time. `step` is a 4-byte tensor for every parameter: on the device for fused (and capturable=True)
and ASGD, else on the host.
Moments in a dtype of their own (`state_dtype`) are those of AnyPrecisionAdamW (for-loop) or of TransformerEngine's and
Megatron's FusedAdam (fused, in place): torch.optim.AdamW keeps them in the parameter's.
Not modelled: differentiable=True.
Sources: torch/optim; torchdistx/optimizers/anyprecision_optimizer.py;
transformer_engine/pytorch/optimizers/fused_adam.py.
"""

from __future__ import annotations

from typing import Any

import torch

from metapeak.strategies.optimizers.kernel import update_in_place
from metapeak.strategies.optimizers.recipe import LEARNING_RATE, call, check_arguments
from metapeak.strategies.optimizers.recipe import Recipe as BaseRecipe
from metapeak.strategies.optimizers.registry import FOREACH, FUSED
from metapeak.strategies.optimizers.roles import Role


class Recipe(BaseRecipe):
    def __init__(self, **fields: Any):
        super().__init__(**fields)
        self._class = getattr(torch.optim, self.class_name)
        check_arguments(f"torch.optim.{self.class_name}", self._class, self.arguments)

    def make(self, roles: list[Role]) -> torch.optim.Optimizer:
        parameters = [role.parameter for role in roles]
        dtype = getattr(torch, self.state_dtype) if self.state_dtype else None
        if dtype is not None and any(parameter.dtype is not dtype for parameter in parameters):
            arguments = {
                name: self.arguments[name] for name in ("lr", "betas", "eps", "weight_decay") if name in self.arguments
            }
            decay = 1e-2 if self.class_name == "AdamW" else 0.0
            arguments = {"weight_decay": decay, **arguments}
            return AdamOfDtype(parameters, state_dtype=dtype, fused=self.implementation == FUSED, **arguments)
        return make_torch_optimizer(self._class, parameters, self.implementation, self.arguments)

    def assumptions(self) -> tuple[str, ...]:
        if not self.state_dtype:
            return ()
        like = "TransformerEngine's FusedAdam, in place" if self.implementation == FUSED else "AnyPrecisionAdamW"
        return (f"moments in {self.state_dtype} where the parameter's dtype is another: the step is that of {like}",)


def make_torch_optimizer(optimizer_class, parameters, implementation: str, arguments: dict) -> torch.optim.Optimizer:
    """The optimizer with its implementation asked for by name: torch's own choice does not know this device."""
    kernels = {"fused": True} if implementation == FUSED else {"foreach": implementation == FOREACH}
    return call(f"torch.optim.{optimizer_class.__name__}", optimizer_class, parameters, **kernels, **arguments)


class AdamOfDtype(torch.optim.Optimizer):
    """AdamW with moments of one dtype for parameters of another, and the temporaries of AnyPrecisionAdamW, or none."""

    def __init__(
        self, parameters, *, state_dtype, fused, lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    ):
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.state_dtype, self.fused = state_dtype, fused

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=self.state_dtype)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.state_dtype)
                state["step"] += 1
                moments = [state["exp_avg"], state["exp_avg_sq"]]
                if self.fused:
                    update_in_place("FusedAdam", parameter, moments)
                    continue
                grad = parameter.grad
                if group["weight_decay"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                moments[0].mul_(beta1).add_(grad, alpha=1 - beta1)
                moments[1].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                # The denominator lives until the next parameter's replaces it, as the local variable that it is there.
                denominator = (moments[1].sqrt() / (1 - beta2) ** 0.5).add_(group["eps"])
                parameter.addcdiv_(moments[0], denominator, value=-group["lr"])
