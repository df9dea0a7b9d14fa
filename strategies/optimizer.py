"""Optimizers: real torch.optim classes, with the implementation that is asked for.

What it changes: what `optimizer.step()` runs. Where each byte comes from: the traced step runs the real optimizer.
Not modelled: optimizers outside torch.optim.
Sources: torch/optim; CUDA picks foreach unless told otherwise (torch/optim/optimizer.py, _default_to_fused_or_foreach).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from metapeak.strategies.master_weights import with_master_weights
from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.spec import OptimizerSpec

if TYPE_CHECKING:
    import torch

# Names of the option `optimizer` -> (class in torch.optim, arguments that the class needs).
OPTIMIZERS: dict[str, tuple[str, dict]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {"lr": 1e-3}),
    "sgd-momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "adagrad": ("Adagrad", {}),
    "rmsprop": ("RMSprop", {}),
}
# fused kernels exist for these classes (torch/optim, `fused` arguments).
_FUSED = {"AdamW", "Adam", "SGD", "Adagrad"}
IMPLEMENTATIONS = ("foreach", "fused", "for-loop", "in-backward")


def check_optimizer(spec: OptimizerSpec) -> None:
    """Raise UnknownName or InputError for a name or implementation that does not exist."""
    if spec.name not in OPTIMIZERS:
        raise UnknownName("optimizer", spec.name, OPTIMIZERS)
    if spec.implementation not in IMPLEMENTATIONS:
        raise UnknownName("optimizer implementation", spec.implementation, IMPLEMENTATIONS)
    if spec.implementation == "fused" and OPTIMIZERS[spec.name][0] not in _FUSED:
        raise InputError(f"torch has no fused kernel for {OPTIMIZERS[spec.name][0]}. Use foreach or for-loop.")


def optimizer_maker(spec: OptimizerSpec) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    """A function from the trainable parameters to the optimizer. Raises as `check_optimizer`."""
    check_optimizer(spec)
    class_name, arguments = OPTIMIZERS[spec.name]
    arguments = dict(arguments)
    if spec.implementation == "fused":
        arguments["fused"] = True
    else:
        arguments["foreach"] = spec.implementation in ("foreach", "in-backward")

    def make(parameters):
        import torch

        return getattr(torch.optim, class_name)(parameters, **arguments)

    return with_master_weights(make) if spec.master_weights else make
