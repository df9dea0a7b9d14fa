"""Policies compared, layers weighed, the best plan under a budget: one trace answers all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from metapeak.strategies.base import Strategy
from metapeak.strategies.checkpoint_planner import least_peak, least_recompute
from metapeak.strategies.checkpoint_policies import (
    EveryBlock,
    EveryNth,
    Nothing,
    Offload,
    Policy,
    SelectiveTorchtitan,
    policy_liveness,
    policy_plan,
    policy_regions,
)
from metapeak.strategies.checkpoint_table import CheckpointTable, checkpoint_table
from metapeak.strategies.compose import simulate
from metapeak.strategies.gradient_checkpointing import CheckpointModules, GradientCheckpointing
from metapeak.strategies.recompute import checkpointed
from metapeak.strategies.regions import Region, regions_of
from metapeak.tracer.device.allocator_config import DEFAULT_CONFIG, AllocatorConfig
from metapeak.tracer.device.overheads import overheads
from metapeak.tracer.errors import InputError
from metapeak.tracer.flops import operation_flops
from metapeak.tracer.gpus import Gpu
from metapeak.tracer.graph import StepGraph
from metapeak.tracer.kernels import Device, KernelWorkspaces, device_of
from metapeak.tracer.liveness import Category, Liveness, Phase
from metapeak.tracer.simulation import RankResult, Simulation
from metapeak.tracer.spec import ModelSpec, StepSpec

# How far the 512-byte rounding of every live storage may lift allocated over requested before a plan is solved again.
_SOLVER_ROUNDS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyResult:
    """One policy: what `apply_checkpoint_plan` does for it, its rank (peak, phases, liveness), what is saved for
    backward at the end of the steady forward, the most bytes on the host, the FLOPs of its recompute in one iteration
    and their share of the plain step's.
    """

    policy: str
    plan: Mapping[str, Any]
    rank: RankResult
    saved_bytes: int
    host_bytes: int
    recompute_flops: int
    extra_flops_percent: float

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the checkpointed or offloaded modules."""
        return (*self.plan["checkpointed"], *self.plan.get("offloaded", ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerResult:
    """One block in one iteration: what it saves for backward, what stays if it is checkpointed, what running it again
    costs.
    """

    layer: str
    kind: str
    saved_bytes: int
    kept_bytes_if_checkpointed: int
    recompute_flops: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The policy with the least recompute whose peak stays under a budget."""

    budget_bytes: int
    result: PolicyResult

    def record(self, model_id: str) -> dict:
        """What a plan file holds, for `apply_checkpoint_plan`."""
        return {
            "model": model_id,
            **self.result.plan,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.result.rank.allocated_bytes,
            "extra_flops_percent": self.result.extra_flops_percent,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointStudy:
    """The answer of `metapeak checkpointing`. `frontier` holds policies no other one beats in both peak and recompute,
    cheapest recompute first. `simulation` is the plain step's.
    """

    simulation: Simulation
    policies: tuple[PolicyResult, ...]
    layers: tuple[LayerResult, ...]
    frontier: tuple[PolicyResult, ...]
    plan: Plan | None


def study_checkpointing(
    model: str | ModelSpec,
    step: StepSpec | None = None,
    policies: Sequence[Policy] = (),
    *,
    strategies: Sequence[Strategy] = (),
    budget_bytes: int | None = None,
    gpu: Gpu | None = None,
    allocator: AllocatorConfig = DEFAULT_CONFIG,
    options=None,
    progress: Callable[[str], None] = lambda what: None,
) -> CheckpointStudy:
    """Compare policies (none, full, every second and fourth block, torchtitan's selective one, offload, and `policies`)
    on one traced step.

    `strategies` come before the checkpoints: LoRA, say.
    `budget_bytes`, or else the GPU's usable memory less the most that context and libraries take, asks for the plan.
    Raises InputError when no plan stays under the budget, with the least peak that one can reach and what
    holds it; and what `simulate` raises.
    """
    strategy = GradientCheckpointing(policy=Nothing())
    applied = [*strategies, strategy]
    simulation = simulate(model, step, applied, gpu=gpu, allocator=allocator, options=options, progress=progress)
    progress("comparing policies")
    judge = _Judge(simulation.graph, device_of(gpu), allocator)
    compared = [Nothing(), EveryBlock(), EveryNth(2), EveryNth(4), SelectiveTorchtitan(), Offload(), *policies]
    results = {policy.name: judge.policy(policy) for policy in compared}
    candidates = judge.candidates(EveryBlock().modules(judge.graph))
    table = checkpoint_table(judge.graph, candidates)
    budget = (
        budget_bytes if budget_bytes is not None else (gpu.usable_bytes - overheads(gpu).high_bytes if gpu else None)
    )
    progress("solving for the best plan")
    # A plan that moves bytes to the host costs transfers, which FLOPs do not show: it is compared, not ranked.
    ranked = [result for result in results.values() if not result.host_bytes]
    frontier = _frontier([*ranked, *judge.steps_between(candidates, table)])
    return CheckpointStudy(
        simulation=simulation,
        policies=tuple(results.values()),
        layers=tuple(judge.layers(candidates)),
        frontier=frontier,
        plan=None if budget is None else judge.plan(candidates, table, budget),
    )


def plan_under(graph: StepGraph, budget_bytes: int) -> Plan:
    """The plan with the least recompute whose peak stays under the budget. Raises InputError when there is none."""
    judge = _Judge(graph, device_of(None))
    candidates = judge.candidates(EveryBlock().modules(graph))
    return judge.plan(candidates, checkpoint_table(graph, candidates), budget_bytes)


def extra_flops_percent(graph: StepGraph, policy: Policy) -> float:
    """FLOPs of the policy's recompute in one iteration, in percent of the plain step's."""
    judge = _Judge(graph, device_of(None))
    return judge.percent(judge.cost(policy_regions(policy, graph)))


class _Judge:
    """Scores sets of modules on one recorded step."""

    def __init__(self, graph: StepGraph, device: Device, allocator: AllocatorConfig = DEFAULT_CONFIG):
        self.graph = graph
        self.flops = operation_flops(graph)
        self._workspaces, self._allocator = KernelWorkspaces.of(graph, device), allocator
        self._plain = graph.liveness()
        self._last = int(self._plain.op_iteration.max())
        self._step_flops = int(self.flops[self._plain.op_iteration == self._last].sum())

    def candidates(self, modules: Sequence[str]) -> list[tuple[str, list[Region]]]:
        """(module, its regions) for the modules that save anything."""
        regions = [(name, regions_of(self.graph, [name])) for name in modules]
        return [(name, members) for name, members in regions if members]

    def policy(self, policy: Policy) -> PolicyResult:
        regions = [] if isinstance(policy, Offload) else policy_regions(policy, self.graph)
        liveness, host_bytes = policy_liveness(policy, self.graph)
        return self._result(policy.name, policy_plan(policy, self.graph), liveness, self.cost(regions), host_bytes)

    def _result(
        self, name: str, plan: Mapping[str, Any], liveness: Liveness, again: int, host_bytes: int = 0
    ) -> PolicyResult:
        liveness = self._workspaces.added_to(liveness)
        return PolicyResult(
            policy=name,
            plan=plan,
            rank=RankResult(rank=0, count=1, coordinates={}, liveness=liveness, allocator=self._allocator),
            saved_bytes=saved_bytes(liveness),
            host_bytes=host_bytes,
            recompute_flops=again,
            extra_flops_percent=self.percent(again),
        )

    def percent(self, again: int) -> float:
        """These FLOPs in percent of the plain step's."""
        return 100 * again / max(self._step_flops, 1)

    def cost(self, regions: Sequence[Region]) -> int:
        """FLOPs of recomputing these regions in the last iteration."""
        return sum(
            int(self.flops[region.operations].sum())
            for region in regions
            if region.length and self._plain.op_iteration[region.begin] == self._last
        )

    def layers(self, candidates) -> list[LayerResult]:
        plain_saved, rows = saved_bytes(self._plain), []
        for name, regions in candidates:
            own = self._saved_by(regions[-1])
            less = plain_saved - saved_bytes(checkpointed(self.graph, regions))
            rows.append(
                LayerResult(
                    layer=name,
                    kind=self.graph.module_classes[self.graph.module_names.index(name)],
                    saved_bytes=own,
                    kept_bytes_if_checkpointed=own - less,
                    recompute_flops=self.cost(regions),
                )
            )
        return rows

    def _saved_by(self, region: Region) -> int:
        """Bytes of storages that the region's saves hold at the end of forward, parameters and buffers not counted."""
        saved, plain = self.graph.saved, self._plain
        rows = {self.graph.value_storage[saved.value[save]] for save in region.saves}
        made = [row for row in rows if plain.category[row] in (Category.ACTIVATION, Category.TEMPORARY)]
        return int(sum(plain.nbytes[row] for row in made))

    def steps_between(self, candidates, table: CheckpointTable, count: int = 12) -> list[PolicyResult]:
        """Least-recompute plans for budgets between the lowest and the plain peak."""
        if not candidates:
            return []
        costs = self._costs(candidates)
        lowest, highest = table.peaks(np.stack([least_peak(table), np.zeros(len(candidates), dtype=bool)]))
        found = {}
        for budget in np.linspace(lowest, highest, count).astype(np.int64):
            chosen = least_recompute(table, costs, int(budget))
            if chosen is not None:
                found[chosen.tobytes()] = chosen
        return [self._chosen(candidates, chosen) for chosen in found.values()]

    def plan(self, candidates, table: CheckpointTable, budget_bytes: int) -> Plan:
        costs = self._costs(candidates)
        allowed = budget_bytes
        for _ in range(_SOLVER_ROUNDS):
            chosen = least_recompute(table, costs, allowed)
            result = self._chosen(candidates, chosen) if chosen is not None else None
            if result is not None and result.rank.allocated_bytes <= budget_bytes:
                return Plan(budget_bytes=budget_bytes, result=result)
            if result is None:
                break
            # Workspaces and rounding to blocks are not in the table: leave room for them and solve again.
            allowed -= result.rank.allocated_bytes - budget_bytes
        raise self._out_of_reach(candidates, table, budget_bytes)

    def _out_of_reach(self, candidates, table: CheckpointTable, budget_bytes: int) -> InputError:
        best = self._chosen(candidates, least_peak(table))
        at = best.rank.peak_at
        holds = sorted(best.rank.breakdown.items(), key=lambda item: -item[1])[:3]
        largest = ", ".join(f"{category.name.lower().replace('_', ' ')} {nbytes:,} B" for category, nbytes in holds)
        return InputError(
            f"No checkpointing plan stays under {budget_bytes:,} bytes: the least reachable peak is "
            f"{best.rank.allocated_bytes:,} bytes, at {at.phase} {at.op}, held by {largest}."
        )

    def _chosen(self, candidates, chosen: np.ndarray) -> PolicyResult:
        taken = [candidate for candidate, take in zip(candidates, chosen) if take]
        plan = {"checkpointed": [name for name, _ in taken]}
        regions = sorted((region for _, members in taken for region in members), key=lambda region: region.begin)
        name = f"{len(taken)} of {len(candidates)} blocks"
        return self._result(name, plan, checkpointed(self.graph, regions), self.cost(regions))

    def _costs(self, candidates) -> np.ndarray:
        return np.array([self.cost(regions) for _, regions in candidates], dtype=np.float64)


def verify(
    result: PolicyResult,
    model: str | ModelSpec,
    step: StepSpec | None = None,
    *,
    strategies: Sequence[Strategy] = (),
    gpu: Gpu | None = None,
    allocator: AllocatorConfig = DEFAULT_CONFIG,
    progress: Callable[[str], None] = lambda what: None,
) -> RankResult:
    """The policy with the real torch.utils.checkpoint around its modules, traced anew: the oracle of the rewrite."""
    progress(f"verifying {result.policy}")
    applied = [*strategies, CheckpointModules(plan=result.plan)]
    return simulate(model, step, applied, gpu=gpu, allocator=allocator, progress=progress).worst


def saved_bytes(liveness: Liveness) -> int:
    """Activations alive at the end of the last iteration's forward, in bytes."""
    forward = (liveness.op_phase == Phase.FORWARD) & (liveness.op_iteration == liveness.op_iteration.max())
    end = int(np.flatnonzero(forward)[-1]) + 1
    kept = (liveness.birth < end) & (liveness.death > end) & (liveness.category == Category.ACTIVATION)
    return int(liveness.nbytes[kept].sum())


def _frontier(results: Sequence[PolicyResult]) -> tuple[PolicyResult, ...]:
    """Results that no other beats in both peak and recompute, least recompute first."""
    kept: list[PolicyResult] = []
    for result in sorted(results, key=lambda result: (result.recompute_flops, result.rank.allocated_bytes)):
        if not kept or result.rank.allocated_bytes < kept[-1].rank.allocated_bytes:
            kept.append(result)
    return tuple(kept)
