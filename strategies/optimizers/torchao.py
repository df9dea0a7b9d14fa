"""Optimizers of torchao: 8-bit, 4-bit and fp8 Adam, without torchao.

What it changes: the optimizer of the step.
Where each byte comes from. A moment of a parameter (of its local shard) with at least 4096 elements, divisible by the
block size, is codes (a byte an element, or half a byte), an fp32 scale for every block (256, 4-bit: 128) and, but for
fp8, a code table of its own (256 fp32 numbers, 4-bit: 16); any other moment is a plain tensor of the parameter's dtype.
`step` and the learning rate are on the host.
The step is one function compiled for each parameter in turn. Its temporaries are those that inductor's lowering leaves
in memory and no fusion can remove: the new scales, and for 4 bits the unpacked codes of both moments as int64, which
the packing reads at two strides.
Not modelled: the one-time memory of compiling; bf16_stochastic_round's random bits (fused).
Sources: torchao 0.18 optim/adam.py (_new_buffer, single_param_adam), subclass_8bit.py, subclass_4bit.py,
subclass_fp8.py; temporaries from the code that inductor writes for single_param_adam.
"""

from __future__ import annotations

from typing import Any

import torch

from metapeak.strategies.optimizers.kernel import unknown_zeros, update_in_place
from metapeak.strategies.optimizers.recipe import Recipe as BaseRecipe
from metapeak.strategies.optimizers.recipe import check_arguments
from metapeak.strategies.optimizers.roles import Role
from metapeak.tracer.errors import InputError

MIN_QUANTISED_NUMEL = 4096
# class -> (codes' dtype, elements in one code, block size, code table size)
FORMATS = {
    "8bit": (torch.uint8, 1, 256, 256),
    "4bit": (torch.uint8, 2, 128, 16),
    "Fp8": (torch.float8_e4m3fn, 1, 256, 0),
}
_NUMBERS = {"lr", "betas", "eps", "weight_decay", "amsgrad", "bf16_stochastic_round"}


class Recipe(BaseRecipe):
    def __init__(self, **fields: Any):
        super().__init__(**fields)
        if self.arguments.get("amsgrad"):
            raise InputError(f"torchao's {self.class_name} fails with amsgrad: its quantised states know no maximum.")
        self._own = {name: value for name, value in self.arguments.items() if name not in _NUMBERS}
        check_arguments(f"torchao's {self.class_name}", TorchAOAdam, self._own)
        block_size = self._own.get("block_size", 1)
        if not isinstance(block_size, int) or block_size < 1:
            raise InputError(f"block_size is {block_size!r}, but has to be a whole number from 1.")

    def make(self, roles: list[Role]) -> TorchAOAdam:
        return TorchAOAdam([role.parameter for role in roles], self.class_name, **self._own)

    def assumptions(self) -> tuple[str, ...]:
        sentence = (
            f"torchao's {self.class_name} steps one parameter at a time in compiled kernels; of their temporaries "
        )
        if "4bit" in self.class_name:
            return (
                sentence + "the unpacked int64 codes of both moments (16 bytes an element) and the scales are counted",
            )
        return (sentence + "only the new scales are counted",)


class TorchAOAdam(torch.optim.Optimizer):
    """Keeps what the real classes keep, and records their compiled step."""

    def __init__(self, params, class_name: str, *, block_size: int | None = None):
        super().__init__(params, {"lr": torch.tensor(1e-3)})
        self.format = next(self_format for name, self_format in FORMATS.items() if class_name.endswith(name))
        self.block_size = block_size or self.format[2]
        self.kernel = f"torchao {class_name}"

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = self._moment(parameter)
                self._update(parameter, [value for name, value in state.items() if name != "step"])

    def _moment(self, parameter: torch.Tensor) -> Any:
        dtype, packed, _, table_size = self.format
        numel = parameter.numel()
        if numel < MIN_QUANTISED_NUMEL or numel % self.block_size:
            return torch.zeros_like(parameter)
        shape = parameter.shape if packed == 1 else (numel // packed,)
        moment = {
            "codes": unknown_zeros(shape, dtype, parameter),
            "scale": unknown_zeros(numel // self.block_size, torch.float32, parameter),
        }
        if table_size:
            moment["qmap"] = torch.empty(table_size, dtype=torch.float32, device=parameter.device)
        return moment

    def _update(self, parameter: torch.Tensor, moments: list[Any]) -> None:
        temporaries = []
        for moment in moments:
            if isinstance(moment, dict):
                temporaries.append(torch.empty_like(moment["scale"]))
                if self.format[1] > 1:
                    temporaries.append(torch.empty(parameter.numel(), dtype=torch.int64, device=parameter.device))
        kept = [tensor for moment in moments for tensor in (moment.values() if isinstance(moment, dict) else [moment])]
        update_in_place(self.kernel, parameter, [*kept, *temporaries])
