"""What may train in place of the plain loop: an engine that reduces gradients and steps by itself (DeepSpeed).

The loop calls `engine.model` with the batch, then `backward` and `step` for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.recorder import Recorder


class Engine(Protocol):
    """`model` is what the loss function calls, `module` the user's module inside it.

    `load` registers what the engine allocated before the step (the module's own tensors are registered already) and is
    the place to watch the recording from. `backward` runs backward and whatever reduction goes with it; `step` the
    optimizer, where the micro-batch is the last of its step.
    """

    model: torch.nn.Module
    module: torch.nn.Module

    def load(self, recorder: Recorder) -> None: ...

    def backward(self, loss: torch.Tensor) -> None: ...

    def step(self) -> None: ...


# From (module on the device, function from parameters to an optimizer or None, micro-batches that are traced) to an
# engine; what it holds of global state is given back when the context ends.
MakeEngine = Callable[["torch.nn.Module", Callable[[list], Any] | None, int], AbstractContextManager[Engine]]
