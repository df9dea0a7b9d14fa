"""Simulations of one model under many options, where steps that are recorded alike share one trace.

Checkpointing policies and the allocator's settings are applied after the trace: for those that differ only there, the
step is recorded once, with its saves, and rewritten. The rewrite equals the real checkpoints operation by operation
(gradient_checkpointing.py); everything else is traced anew. A base that is partly frozen is recorded separately with
and without checkpoints, because PEFT and transformers let gradients reach the blocks only where there are some. What
several ranks do is never shared, nor are models of the user's own code or of other packages, which checkpoint in ways
of their own, nor a policy that the model's own switch would refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from metapeak.strategies.base import Strategy
from metapeak.strategies.checkpoint_policies import EveryBlock, Nothing, Policy, parse_policy
from metapeak.strategies.compose import simulate
from metapeak.strategies.gradient_checkpointing import GradientCheckpointing
from metapeak.strategies.lifecycle import Lifecycle
from metapeak.strategies.parallel.options import parallel_strategies
from metapeak.strategies.request import (
    allocator_of,
    gpu_of,
    lifecycle_of,
    model_spec,
    model_strategies,
    simulate_resolved,
    step_spec,
)
from metapeak.tracer.simulation import Option, Simulation

# Options that are applied to a recorded step.
_AFTER_THE_TRACE = frozenset({"checkpointing", "allocator_config"})


@dataclass(frozen=True, kw_only=True, eq=False)
class _Recorded:
    """A step recorded with its saves. `can_checkpoint`: the model has a switch of its own for checkpoints."""

    simulation: Simulation
    strategies: tuple[Strategy, ...]
    workspaces: Any
    can_checkpoint: bool


@dataclass(frozen=True, kw_only=True)
class _Carrier(GradientCheckpointing):
    """No checkpoints yet: the step is recorded so that they can be put in, and the model is asked for its switch."""

    seen: dict[str, bool] = field(default_factory=dict, compare=False)

    def prepare(self, module):
        self.seen["can_checkpoint"] = bool(getattr(module, "supports_gradient_checkpointing", False))
        return GradientCheckpointing.prepare(self, module)


class SharedTraces:
    """Simulations of `reference`; the last recorded step is kept, so ask for those that share one after another.

    `traces` counts how many steps were recorded.
    """

    def __init__(self, reference: str, progress: Callable[[str], None] = lambda what: None):
        self.reference, self.progress, self.traces = reference, progress, 0
        self._key: tuple | None = None
        self._recorded: _Recorded | None = None

    def simulate(self, options: Mapping[str, Option]) -> Simulation:
        """As `simulate_resolved` for resolved options. Raises what it raises."""
        policy = parse_policy(options["checkpointing"].value)
        parallel = parallel_strategies({name: option.value for name, option in options.items()})
        if parallel or ":" in self.reference or lifecycle_of(options) != Lifecycle():
            return self._alone(options)
        key = trace_key(options)
        if key != self._key:
            self._key = self._recorded = None  # let go of the old graph before the new one is made
            self._recorded = self._record(options)
            self._key = key
            self.traces += 1
        if isinstance(policy, EveryBlock) and not self._recorded.can_checkpoint:
            return self._alone(options)
        return self._answer(options, policy)

    def extra_flops_percent(self, policy: Policy) -> float | None:
        """FLOPs of a policy's recompute, in percent of the step recorded last; None for a step that is never shared."""
        from metapeak.strategies.checkpoint_study import extra_flops_percent

        return extra_flops_percent(self._recorded.simulation.graph, policy) if self._recorded is not None else None

    def _alone(self, options: Mapping[str, Option]) -> Simulation:
        self._key = self._recorded = None
        self.traces += 1
        return simulate_resolved(self.reference, options, progress=self.progress)

    def _record(self, options: Mapping[str, Option]) -> _Recorded:
        from metapeak.tracer.kernels import KernelWorkspaces, device_of

        strategies = tuple(model_strategies(options))
        gpu = gpu_of(options)
        carrier = _Carrier(policy=Nothing())
        simulation = simulate(
            model_spec(self.reference, options),
            step_spec(options),
            [*strategies, carrier] if _has_saves(options) else strategies,
            gpu=gpu,
            allocator=allocator_of(options),
            options=options,
            progress=self.progress,
        )
        workspaces = KernelWorkspaces.of(simulation.graph, device_of(gpu))
        return _Recorded(
            simulation=simulation,
            strategies=strategies,
            workspaces=workspaces,
            can_checkpoint=carrier.seen.get("can_checkpoint", False),
        )

    def _answer(self, options: Mapping[str, Option], policy: Policy) -> Simulation:
        recorded = self._recorded
        base, graph, gpu = recorded.simulation, recorded.simulation.graph, gpu_of(options)
        allocator = allocator_of(options)
        own = [] if isinstance(policy, Nothing) else [GradientCheckpointing(policy=policy)]
        given = {name: options[name] for name in _AFTER_THE_TRACE}
        sentences = [*base.how.assumptions]
        rank = replace(base.ranks[0], allocator=allocator)
        if own:
            liveness = graph.liveness()
            for strategy in (*recorded.strategies, *own):
                liveness = strategy.rewrite(liveness, graph)
            rank = replace(rank, liveness=recorded.workspaces.added_to(liveness))
            for strategy in own:
                sentences += [*strategy.assumptions(), *strategy.remarks(graph)]
        return replace(
            base,
            options={**base.options, **given},
            how=replace(base.how, assumptions=tuple(dict.fromkeys(sentences))),
            ranks=(rank,),
            fit=rank.fit_on(gpu),
            graph=graph,
        )


def trace_key(options: Mapping[str, Option]) -> tuple:
    """What decides the recorded step: options with equal keys share a trace."""
    values = [(name, repr(option.value)) for name, option in options.items() if name not in _AFTER_THE_TRACE]
    return (*sorted(values), _has_saves(options))


def _has_saves(options: Mapping[str, Option]) -> bool:
    """Whether the step is recorded so that checkpoints can be put in: always for a full fine-tune."""
    return options["method"].value == "full" or options["checkpointing"].value != "none"
