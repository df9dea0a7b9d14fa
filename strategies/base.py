"""What a strategy is: one technique, with three doors and a list of what it assumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.liveness import Liveness
    from metapeak.tracer.models import ResolvedModel
    from metapeak.tracer.spec import StepSpec


@runtime_checkable
class Strategy(Protocol):
    """A frozen, keyword-only dataclass whose fields are its options.

    `check` refuses impossible combinations before the trace (raises InputError with the rule). `prepare` changes the
    real module on meta before the trace, with the real library. `rewrite` changes the liveness of one rank after the
    trace. `assumptions` are sentences that every report prints. A strategy computes no total and prints nothing.
    """

    name: str

    def check(self, model: ResolvedModel, step: StepSpec) -> None: ...

    def prepare(self, module: torch.nn.Module) -> None: ...

    def rewrite(self, liveness: Liveness) -> Liveness: ...

    def assumptions(self) -> tuple[str, ...]: ...


class NoOpStrategy:
    """A strategy that does nothing at any door; others override the doors that they use."""

    name = "none"

    def check(self, model: ResolvedModel, step: StepSpec) -> None:
        pass

    def prepare(self, module: torch.nn.Module) -> None:
        pass

    def rewrite(self, liveness: Liveness) -> Liveness:
        return liveness

    def assumptions(self) -> tuple[str, ...]:
        return ()
