"""Several optimizers in the place of one."""

from __future__ import annotations

from typing import Any


class SeveralOptimizers:
    """Steps each of `optimizers` in order. To a training loop it is one optimizer."""

    def __init__(self, optimizers: list[Any]):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict:
        return {owner: state for optimizer in self.optimizers for owner, state in optimizer.state.items()}

    def step(self, closure=None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
