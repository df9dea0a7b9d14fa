"""A kernel that reads a gradient and writes a parameter and its states in place: what fused optimizers run on CUDA."""

from __future__ import annotations

import torch

from metapeak.strategies.operators import declare

declare("optimizer_update(str kernel, Tensor(a!) parameter, Tensor grad, Tensor(b!)[] states) -> ()", key="Meta")


def update_in_place(kernel: str, parameter: torch.Tensor, states: list[torch.Tensor]) -> None:
    """Record the kernel: an operation that allocates nothing. Tensors in managed memory are not among `states`."""
    torch.ops.metapeak.optimizer_update(kernel, parameter, parameter.grad, states)


def unknown_zeros(shape, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Zeros beside a parameter that the phantom GPU does not keep real values for, as it does for `torch.zeros`."""
    return torch.empty(shape, dtype=dtype, device=like.device).zero_()
