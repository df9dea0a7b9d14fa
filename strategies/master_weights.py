"""Master weights: the optimizer works on float32 copies of weights in 16 bits.

What it changes: the optimizer is made over float32 copies of the trainable weights in bf16 or fp16, so its states are
float32; every step casts the gradients to float32, frees the model's, steps, and copies the result back.
Where each byte comes from: the copies are made, cast and stepped for real in the traced loop.
Not modelled: copies stored as the 16 bits that the weights lack (Megatron's precision-aware optimizer, store_param_
remainders), flat buffers and partitions (DeepSpeed).
Sources: Megatron-LM, megatron/core/optimizer/optimizer.py, Float16OptimizerWithFloat16Params (main_param =
param.detach().clone().float(), _copy_model_grads_to_main_grads, _copy_main_params_to_model_params); NVIDIA apex,
apex/amp/_process_optimizer.py (O2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def with_master_weights(
    make: Callable[[list], torch.optim.Optimizer], model: torch.nn.Module | None = None
) -> Callable[[list], MasterWeights]:
    """A function from the trainable parameters to the optimizer that `make` makes, over float32 copies of them.

    With a `model` the copies go by the names that their parameters have in it: `make` gets (name, tensor) pairs.
    """

    def make_masters(parameters):  # looked up here: the module's parameters are replaced when it moves to the device
        names = {id(parameter): name for name, parameter in model.named_parameters()} if model is not None else None
        return MasterWeights(parameters, make, names)

    return make_masters


class MasterWeights:
    """An optimizer over float32 copies of the parameters that are not in float32 themselves.

    `master_weights` lists (parameter, its copy). `take_gradients` moves the gradients to the copies; it comes before
    whatever looks at them (clipping, loss scaling) and before `step`. A parameter's `main_grad`, where the loop
    accumulates in float32, is used as it is.
    """

    # GradScaler unscales the gradients itself instead of handing its scale to a fused kernel.
    _step_supports_amp_scaling = False

    def __init__(
        self, parameters: list, make: Callable[[list], torch.optim.Optimizer], names: Mapping[int, str] | None
    ):
        import torch

        self.master_weights = [
            (parameter, parameter.detach().clone().float())
            for parameter in parameters
            if parameter.dtype is not torch.float32
        ]
        masters = {id(parameter): master for parameter, master in self.master_weights}
        self._parameters = parameters
        owned = [masters.get(id(parameter), parameter) for parameter in parameters]
        self._optimizer = make(
            [(names[id(parameter)], own) for parameter, own in zip(parameters, owned)] if names is not None else owned
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @property
    def state(self) -> dict:
        return self._optimizer.state

    def take_gradients(self) -> None:
        for parameter, master in self.master_weights:
            gradient = getattr(parameter, "main_grad", parameter.grad)
            if gradient is not None:
                master.grad = gradient.float()
            parameter.grad = None

    def step(self) -> None:
        import torch

        self._optimizer.step()
        if self.master_weights:
            with torch.no_grad():
                torch._foreach_copy_(*map(list, zip(*self.master_weights)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none=set_to_none)
        for parameter in self._parameters:
            parameter.grad = None
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()
