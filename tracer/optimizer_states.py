"""What an optimizer keeps between steps: every tensor of its state, however it is nested or wrapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from metapeak.tracer.liveness import Category


def optimizer_tensors(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """(whose state it is, tensor) for every tensor that the optimizer keeps.

    The owner is a parameter, or another key of `optimizer.state`, or None for what a parameter group holds (a learning
    rate on the device, for example). Dictionaries, lists and wrapper subclasses (quantised states) are looked through.
    """
    for owner, state in optimizer.state.items():
        for tensor in plain_tensors(state):
            yield owner, tensor
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                for tensor in plain_tensors(value):
                    yield None, tensor


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors with storages of their own inside a value.

    >>> [tensor.shape[0] for tensor in plain_tensors({"codes": torch.zeros(2), "more": [torch.zeros(3), 1]})]
    [2, 3]
    """
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                yield from plain_tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from plain_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from plain_tensors(item)


def mark_optimizer_states(recorder: Any, optimizer: Any) -> None:
    """Tell a recorder that the storages of all optimizer tensors are optimizer states, and of which parameter."""
    for owner, tensor in optimizer_tensors(optimizer):
        recorder.mark(tensor, Category.OPTIMIZER_STATE, owner if isinstance(owner, torch.Tensor) else None)
