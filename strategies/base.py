"""What a strategy is: one technique, with its doors and a list of what it assumes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from metapeak.strategies.parallel.layout import Layout
    from metapeak.tracer.engine import MakeEngine
    from metapeak.tracer.graph import StepGraph
    from metapeak.tracer.liveness import Liveness
    from metapeak.tracer.models import ResolvedModel
    from metapeak.tracer.simulation import Option
    from metapeak.tracer.spec import StepSpec


@runtime_checkable
class Strategy(Protocol):
    """A frozen, keyword-only dataclass whose fields are its options.

    `layout` is how ranks are arranged, for a strategy that spreads a job over several (None for the others).
    `check` refuses impossible combinations before the trace (raises InputError with the rule). `prepare` changes the
    real module on meta before the trace, with the real library, and returns the module to train: the same one, or a
    wrapper around it as a script would hold; `loss_function` may wrap the function of (model, batch) that computes the
    loss. `distribute` shards the module on the device, as one rank of the layout, and returns what trains; `running` is
    in force until the last step is over. `rewrite` changes the liveness of one rank after the trace; the graph it came
    from is there to be read; `rewrites` says whether it may. `engine`, where it is not None, makes what trains in place
    of the plain loop (tracer/engine.py). `offloaded_bytes` is what a rank then keeps on the host while it trains.
    `assumptions` are sentences that every report prints, `notes` those that the prepared module gives rise to,
    `remarks` those of the recorded step. `resolved` are options whose value only the prepared module shows; what the
    user gave wins over them. A strategy computes no total and prints nothing.
    """

    name: str
    # Whether `rewrite` wants a graph recorded with `decouple_saves` (see tracer/saved_tensors.py).
    needs_saves: bool
    # Packages that the strategy takes seconds to import; simulate does so where it imports torch.
    imports: tuple[str, ...]
    layout: Layout | None
    # The dtype that parameters have while layers compute, where the strategy casts them (FSDP's mixed precision).
    casts_to: str | None
    engine: MakeEngine | None

    def check(self, model: ResolvedModel, step: StepSpec) -> None: ...

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module: ...

    def resolved(self, module: torch.nn.Module) -> Mapping[str, Option]: ...

    def notes(self, module: torch.nn.Module) -> tuple[str, ...]: ...

    def loss_function(self, inner: Callable[..., Any]) -> Callable[..., Any]: ...

    def distribute(self, module: torch.nn.Module) -> torch.nn.Module: ...

    def running(self) -> AbstractContextManager[Any]: ...

    def rewrite(self, liveness: Liveness, graph: StepGraph) -> Liveness: ...

    def offloaded_bytes(self, graph: StepGraph) -> int: ...

    def assumptions(self) -> tuple[str, ...]: ...

    def remarks(self, graph: StepGraph) -> tuple[str, ...]: ...


class NoOpStrategy:
    """A strategy that does nothing at any door; others override the doors that they use."""

    name = "none"
    needs_saves = False
    imports: tuple[str, ...] = ()
    layout = None
    casts_to: str | None = None
    engine: MakeEngine | None = None

    def check(self, model: ResolvedModel, step: StepSpec) -> None:
        pass

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def resolved(self, module: torch.nn.Module) -> Mapping[str, Option]:
        return {}

    def notes(self, module: torch.nn.Module) -> tuple[str, ...]:
        return ()

    def loss_function(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        return inner

    def distribute(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def running(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @property
    def rewrites(self) -> bool:
        """Whether `rewrite` may change anything."""
        return type(self).rewrite is not NoOpStrategy.rewrite

    def rewrite(self, liveness: Liveness, graph: StepGraph) -> Liveness:
        return liveness

    def offloaded_bytes(self, graph: StepGraph) -> int:
        return 0

    def assumptions(self) -> tuple[str, ...]:
        return ()

    def remarks(self, graph: StepGraph) -> tuple[str, ...]:
        return ()
