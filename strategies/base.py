"""What a strategy is: one technique, with three doors and a list of what it assumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from metapeak.strategies.parallel.layout import Layout
    from metapeak.tracer.graph import StepGraph
    from metapeak.tracer.liveness import Liveness
    from metapeak.tracer.models import ResolvedModel
    from metapeak.tracer.spec import StepSpec


@runtime_checkable
class Strategy(Protocol):
    """A frozen, keyword-only dataclass whose fields are its options.

    `layout` is how ranks are arranged, for a strategy that spreads a job over several (None for the others).
    `check` refuses impossible combinations before the trace (raises InputError with the rule). `prepare` changes the
    real module on meta before the trace, with the real library; `distribute` shards it on the device, as one rank of
    the layout. `rewrite` changes the liveness of one rank after the trace; the graph it came from is there to be read.
    `assumptions` are sentences that every report prints, `remarks` those that the recorded step gives
    rise to. A strategy computes no total and prints nothing.
    """

    name: str
    # Whether `rewrite` wants a graph recorded with `decouple_saves` (see tracer/saved_tensors.py).
    needs_saves: bool
    layout: Layout | None

    def check(self, model: ResolvedModel, step: StepSpec) -> None: ...

    def prepare(self, module: torch.nn.Module) -> None: ...

    def distribute(self, module: torch.nn.Module) -> torch.nn.Module: ...

    def rewrite(self, liveness: Liveness, graph: StepGraph) -> Liveness: ...

    def assumptions(self) -> tuple[str, ...]: ...

    def remarks(self, graph: StepGraph) -> tuple[str, ...]: ...


class NoOpStrategy:
    """A strategy that does nothing at any door; others override the doors that they use."""

    name = "none"
    needs_saves = False
    layout = None

    def check(self, model: ResolvedModel, step: StepSpec) -> None:
        pass

    def prepare(self, module: torch.nn.Module) -> None:
        pass

    def distribute(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def rewrite(self, liveness: Liveness, graph: StepGraph) -> Liveness:
        return liveness

    def assumptions(self) -> tuple[str, ...]:
        return ()

    def remarks(self, graph: StepGraph) -> tuple[str, ...]:
        return ()
