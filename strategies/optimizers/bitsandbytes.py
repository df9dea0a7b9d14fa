"""Optimizers of bitsandbytes: 8-bit, 32-bit and paged, without bitsandbytes.

What it changes: the optimizer of the step.
Where each byte comes from. 8 bits: a state is one byte an element, with an fp32 scale (absmax) for every block of 256,
and code tables of 256 fp32 numbers on the device, shared by all parameters: one for signed states and, with a second
state, one for unsigned ones. A parameter of fewer than 4096 elements (`min_8bit_size`) keeps fp32 states, and so does
an embedding with `embeddings_32bit`, as the Hugging Face Trainer asks for. 32 bits: fp32 states also for half precision
parameters. AdEMAMix's first state is two moments. The update is one kernel for each parameter, in place, without
temporaries; LAMB and LARS take the norm of an fp32 copy first. `step` is a Python number.
Paged: a state of 100,000 elements or more is managed memory, outside torch's allocator. It is on the device as long as
there is room, moves to the host when there is not, and is counted nowhere but in a remark. Its scales are on the
device.
Not modelled: percentile clipping (removed from bitsandbytes); AdEMAMix32bit, whose first state the library makes too
small.
Sources: bitsandbytes 0.50 optim/optimizer.py (init_state, update_step, get_state_buffer, check_overrides),
optim/ademamix.py, backends/cuda/ops.py (which kernels exist); transformers/trainer.py, create_optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from metapeak.strategies.optimizers.kernel import unknown_zeros, update_in_place
from metapeak.strategies.optimizers.recipe import Recipe as BaseRecipe
from metapeak.strategies.optimizers.recipe import check_arguments
from metapeak.strategies.optimizers.roles import Role
from metapeak.tracer.errors import InputError

BLOCK_SIZE = 256
MIN_8BIT_SIZE = 4096
CODE_TABLE_SIZE = 256
# Buffers below it are not paged. Source: get_state_buffer, `p.numel() < 1e5`.
MIN_PAGED_NUMEL = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """States that a parameter has, and what its kernels can do."""

    states: int
    first_is_double: bool = False
    max_unorm: float = 0.0
    has_8bit: bool = True
    bf16_in_32bit: bool = True


ALGORITHMS = {
    "adam": Algorithm(states=2),
    "adamw": Algorithm(states=2),
    "ademamix": Algorithm(states=2, first_is_double=True),
    "lion": Algorithm(states=1),
    "sgd": Algorithm(states=1, bf16_in_32bit=False),
    "rmsprop": Algorithm(states=1, bf16_in_32bit=False),
    "adagrad": Algorithm(states=1, bf16_in_32bit=False),
    "lamb": Algorithm(states=2, max_unorm=1.0, has_8bit=False),
    "lars": Algorithm(states=1, max_unorm=0.02, has_8bit=False, bf16_in_32bit=False),
}
# Arguments of the classes that change no byte.
_NUMBERS = {
    "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "alpha", "t_alpha", "t_beta3",
    "skip_zeros", "initial_accumulator_value", "lr_decay",
}  # fmt: skip


class Recipe(BaseRecipe):
    def __init__(self, **fields: Any):
        super().__init__(**fields)
        own = {name: value for name, value in self.arguments.items() if name not in _NUMBERS}
        check_arguments(f"bitsandbytes' {self.class_name}", BitsAndBytesOptimizer, own)
        self._own, self._paged_bytes = own, 0

    def make(self, roles: list[Role]) -> BitsAndBytesOptimizer:
        arguments = dict(self._own)
        embeddings = [role.parameter for role in roles if role.is_embedding]
        return BitsAndBytesOptimizer(
            [role.parameter for role in roles],
            self.class_name,
            embeddings=embeddings,
            note_paged=self._note_paged,
            **arguments,
        )

    def _note_paged(self, nbytes: int) -> None:
        self._paged_bytes += nbytes

    def remarks(self) -> tuple[str, ...]:
        if not self.arguments.get("paged"):
            return ()
        return (
            f"paged optimizer states ({self._paged_bytes:,} bytes) are managed memory outside PyTorch's allocator: on "
            "the GPU as long as there is room, and counted in no number here",
        )


class BitsAndBytesOptimizer(torch.optim.Optimizer):
    """Keeps what the real classes keep on CUDA and records their kernels; `embeddings` are those among `params`."""

    def __init__(
        self,
        params,
        algorithm: str,
        *,
        bits: int,
        paged: bool = False,
        min_8bit_size: int = MIN_8BIT_SIZE,
        max_unorm: float | None = None,
        embeddings_32bit: bool = False,
        embeddings=(),
        note_paged=lambda nbytes: None,
    ):
        super().__init__(params, {"lr": 1e-3})
        self.algorithm, self.bits, self.paged = ALGORITHMS[algorithm], bits, paged
        self.kernel = f"bitsandbytes {algorithm}"
        self.min_8bit_size = min_8bit_size
        self.max_unorm = self.algorithm.max_unorm if max_unorm is None else max_unorm
        self._in_32bit = {id(parameter) for parameter in embeddings} if embeddings_32bit else set()
        self._note_paged = note_paged
        self._code_tables: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    self._init_state(parameter, state)
                if not parameter.grad.is_contiguous():
                    parameter.grad = parameter.grad.contiguous()
                self._update(parameter, state)

    def _init_state(self, parameter: torch.Tensor, state: dict) -> None:
        quantised = self.bits == 8 and parameter.numel() >= self.min_8bit_size and id(parameter) not in self._in_32bit
        if quantised:
            tables, blocks = self._tables(parameter.device), -(-parameter.numel() // BLOCK_SIZE)
        for number in range(1, self.algorithm.states + 1):
            double = (2,) if number == 1 and self.algorithm.first_is_double else ()
            dtype = torch.uint8 if quantised else torch.float32
            state[f"state{number}"] = self._buffer(parameter, double, dtype)
            if quantised:
                state[f"qmap{number}"] = tables[number - 1]
                state[f"absmax{number}"] = unknown_zeros((*double, blocks), torch.float32, parameter)
        if self.max_unorm > 0.0:
            state["unorm_vec"] = unknown_zeros((1,), torch.float32, parameter)

    def _tables(self, device: torch.device) -> list[torch.Tensor]:
        if not self._code_tables:
            self._code_tables = [
                torch.empty(CODE_TABLE_SIZE, dtype=torch.float32, device=device) for _ in range(self.algorithm.states)
            ]
        return self._code_tables

    def _buffer(self, parameter: torch.Tensor, double: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A state of zeros; a paged one is a tensor on meta, which the recorder does not see."""
        shape = (*double, *parameter.shape)
        if not self.paged or parameter.numel() < MIN_PAGED_NUMEL:
            return unknown_zeros(shape, dtype, parameter)
        buffer = torch.empty(shape, dtype=dtype, device="meta")
        self._note_paged(buffer.numel() * buffer.element_size())
        return buffer

    def _update(self, parameter: torch.Tensor, state: dict) -> None:
        if state["state1"].dtype is torch.float32:
            if parameter.grad.dtype is torch.bfloat16 and not self.algorithm.bf16_in_32bit:
                raise InputError(
                    f"{self.kernel} has no 32-bit kernel for bf16 gradients (states of a parameter of fewer than "
                    f"{self.min_8bit_size} elements are in 32 bits, too). Use fp32 or fp16 weights, or adamw8bit or "
                    "lion8bit."
                )
            if self.max_unorm > 0.0:
                torch.norm(parameter.float())
        elif not self.algorithm.has_8bit:
            raise InputError(f"{self.kernel} has no 8-bit kernel.")
        on_device = [tensor for tensor in state.values() if tensor.device == parameter.device]
        update_in_place(self.kernel, parameter, on_device)
