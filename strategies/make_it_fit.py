"""What would make a step fit: the cheapest single changes of options and pairs of them, each simulated.

What it changes: nothing by itself; a change is options in place of those that were given, and each set of changes goes
through the same simulation as the question did. Steps that differ only after the trace share one (shared_trace.py).
Where each byte comes from: the simulations; the FLOPs of recompute from the recorded step.
Not modelled: time. Changes are ordered by what they cost in kind (COSTS): nothing, another kernel, compute, another
number format, another training; recompute counts with its FLOPs. What several GPUs would do belongs to `plan`.
Sources: as of the strategies that the changes ask for.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from metapeak.strategies.checkpoint_policies import Nothing, Offload, parse_policy
from metapeak.strategies.request import gpu_of
from metapeak.strategies.shared_trace import SharedTraces, trace_key
from metapeak.tracer.device.overheads import overheads
from metapeak.tracer.errors import MetapeakError
from metapeak.tracer.liveness import Category
from metapeak.tracer.simulation import Option, Simulation, Verdict

# What kinds of change cost, cheapest first; the sum of a pair's decides its place. Recompute adds its FLOPs / 100 %.
COSTS = {"none": 0.0, "kernel": 1.0, "smaller micro-batch": 2.0, "recompute": 2.0, "format": 4.0, "training": 8.0}
SUGGESTIONS = 5
SECONDS = 60.0
_ORIGIN = "make it fit"
# A plan counts live bytes, and segments lie above them. Only decides which plan is tried: what comes of it is judged.
_SHARE_OF_LIVE_BYTES = 0.95
# Optimizers that have a fused implementation, and the 8-bit form of each.
_FUSED = ("adamw", "adam", "sgd")
_EIGHT_BIT = {"adamw": "adamw8bit", "adam": "adam8bit"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Options to set in place of the given ones: what it is called, its kind of cost (a key of COSTS), what it costs
    in words. `leaves` is the least share of the parameters, gradients and optimizer states that is left with it.
    """

    name: str
    options: Mapping[str, Any]
    kind: str
    costs: str
    leaves: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def excludes(self, other: Change) -> bool:
        """Whether the two set the same option, or one makes the other's pointless."""
        both = {*self.options, *other.options}
        # The states of adapters are too small to be worth another optimizer.
        return bool({*self.options} & {*other.options}) or {"method", "implementation"} <= both


@dataclass(frozen=True, kw_only=True, eq=False)
class Suggestion:
    """Changes that together make the step fit, its simulation, and what recompute they cost (None: not counted)."""

    changes: tuple[Change, ...]
    simulation: Simulation
    extra_flops_percent: float | None = 0.0

    @property
    def name(self) -> str:
        return " + ".join(change.name for change in self.changes)

    @property
    def cost(self) -> float:
        return sum(COSTS[change.kind] for change in self.changes) + (self.extra_flops_percent or 0.0) / 100

    @property
    def device_bytes(self) -> int:
        return self.simulation.worst.device_bytes

    @property
    def costs(self) -> tuple[str, ...]:
        """What each change costs, in words."""
        said = [change.costs for change in self.changes if change.kind != "recompute"]
        if any(change.kind == "recompute" for change in self.changes):
            percent = self.extra_flops_percent
            said.append("recompute" if percent is None else f"{percent:.0f} % more FLOPs")
        return tuple(said)


@dataclass(frozen=True, kw_only=True, eq=False)
class MakeItFit:
    """The answer: suggestions, cheapest first; the tried set of changes that needs least where none fits; how many
    sets were simulated on how many traces; how many were ruled out because the model states alone are too large; how
    many were left when the time was over; those that could not be simulated, with the reason.
    """

    suggestions: tuple[Suggestion, ...]
    closest: Suggestion | None
    tried: int
    ruled_out: int
    left: int
    traces: int
    refused: Mapping[str, str] = field(default_factory=dict)


def suggestions_record(fit: MakeItFit) -> dict[str, Any]:
    """The answer as plain values; bytes are integers."""
    return {
        "found": [_record(suggestion) for suggestion in fit.suggestions],
        "closest": None if fit.closest is None else _record(fit.closest),
        "tried": fit.tried,
        "ruled_out": fit.ruled_out,
        "left": fit.left,
    }


def _record(suggestion: Suggestion) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for change in suggestion.changes:
        options |= change.options
    fit = suggestion.simulation.fit
    return {
        "changes": [change.name for change in suggestion.changes],
        "options": options,
        "device_bytes": suggestion.device_bytes,
        "headroom_bytes": fit.headroom_bytes,
        "verdict": fit.verdict.value,
        "extra_flops_percent": suggestion.extra_flops_percent,
        "costs": list(suggestion.costs),
    }


def changes_of(simulation: Simulation, options: Mapping[str, Option]) -> list[Change]:
    """The changes that make sense for this step, cheapest kind first."""
    values = {name: option.value for name, option in {**options, **simulation.options}.items()}
    return sorted(_changes(values, simulation, options), key=lambda change: COSTS[change.kind])


def _changes(values: Mapping[str, Any], simulation: Simulation, options: Mapping[str, Option]) -> Iterator[Change]:
    config = values.get("allocator_config") or ""
    if "expandable_segments" not in config:
        yield Change(
            name="expandable segments",
            options={"allocator_config": ",".join(filter(None, [config, "expandable_segments:True"]))},
            kind="none",
            costs="a setting of the allocator",
        )
    optimizer, implementation = values.get("optimizer"), values.get("implementation")
    if optimizer in _FUSED and implementation in (None, "foreach"):
        yield Change(
            name="fused optimizer",
            options={"implementation": "fused"},
            kind="none",
            costs="another kernel, same result",
        )
    if values.get("loss") in (None, "eager") and _has_head(simulation):
        yield Change(
            name="fused-linear loss", options={"loss": "fused-linear"}, kind="kernel", costs="a loss kernel (Liger)"
        )
    yield from _recompute(values, options)
    yield from _smaller_batches(values)
    if values.get("weights_dtype") in ("fp32", "float32") and _supports_bf16(options):
        yield Change(
            name="bf16",
            options={"weights_dtype": "bf16", "autocast": None},
            kind="format",
            costs="weights, gradients and states in 16 bits",
            leaves=(0.5, 0.5, 0.5),
        )
    if optimizer in _EIGHT_BIT and values.get("state_dtype") is None and not values.get("master_weights"):
        yield Change(
            name="8-bit optimizer",
            options={"optimizer": _EIGHT_BIT[optimizer], "implementation": None},
            kind="format",
            costs="optimizer states in 8 bits (bitsandbytes)",
            leaves=(1.0, 1.0, 0.25),
        )
    yield from _adapters(values)


def _recompute(values: Mapping[str, Any], options: Mapping[str, Option]) -> Iterator[Change]:
    if values.get("checkpointing") in (None, "none"):
        gpu = gpu_of(options)
        budget = gpu.usable_bytes - overheads(gpu).high_bytes
        if budget > 0:
            yield Change(
                name="checkpointing plan",
                options={"checkpointing": f"budget:{_SHARE_OF_LIVE_BYTES * budget / 2**30:.2f}"},
                kind="recompute",
                costs="recompute",
            )
    if values.get("checkpointing") != "full":
        yield Change(name="checkpointing full", options={"checkpointing": "full"}, kind="recompute", costs="recompute")


def _smaller_batches(values: Mapping[str, Any]) -> Iterator[Change]:
    """Half of the micro-batch, a quarter, ...: the samples of a step stay the same."""
    batch, accumulated, parts = values.get("batch_size") or 1, values.get("grad_accum") or 1, 2
    while batch % parts == 0:
        yield Change(
            name=f"batch {batch // parts}, {accumulated * parts} accumulated",
            options={"batch_size": batch // parts, "grad_accum": accumulated * parts},
            kind="smaller micro-batch",
            costs=f"{parts} x as many passes of fewer samples",
        )
        parts *= 2


def _adapters(values: Mapping[str, Any]) -> Iterator[Change]:
    method = values.get("method")
    base = {"trainable": None, "master_weights": False, "grad_accum_dtype": None}
    if method in ("full", "frozen-base"):
        yield Change(
            name="method lora",
            options={"method": "lora", **base},
            kind="training",
            costs="only adapters are trained",
            leaves=(1.0, 0.0, 0.0),
        )
    if method in ("full", "frozen-base", "lora"):
        yield Change(
            name="method qlora",
            options={"method": "qlora", **base},
            kind="training",
            costs="only adapters are trained, on an nf4 base",
            leaves=(0.125, 0.0, 0.0),
        )


def _has_head(simulation: Simulation) -> bool:
    return simulation.model.architecture.endswith("ForCausalLM")


def _supports_bf16(options: Mapping[str, Option]) -> bool:
    gpu = gpu_of(options)
    return gpu is None or gpu.supports_bf16


def make_it_fit(
    reference: str,
    simulation: Simulation,
    options: Mapping[str, Option],
    *,
    count: int = SUGGESTIONS,
    seconds: float = SECONDS,
    progress: Callable[[str], None] = lambda what: None,
) -> MakeItFit:
    """The cheapest single changes and pairs that make `reference` under the resolved `options` fit their GPU.

    Arguments: what `simulate_resolved` was given and returned; how many suggestions; how long no new trace is begun
    after. A pair is tried only where neither of its changes suffices alone. Sets of changes that cannot be simulated
    (a loss that the model does not have) are returned with the reason.
    """
    deadline = time.monotonic() + seconds
    search = _Search(SharedTraces(reference, lambda what: None), options)
    singles = [(change,) for change in changes_of(simulation, options)]
    pairs = [
        pair for pair in itertools.combinations([change for (change,) in singles], 2) if not pair[0].excludes(pair[1])
    ]
    floor = _Floor(simulation)
    possible = [changes for changes in (*singles, *pairs) if floor.allows(changes)]
    left = 0
    for changes in _by_trace(possible, search):
        if search.enough(changes, count):
            continue
        if time.monotonic() > deadline:
            left += 1
            continue
        progress(f"what would fit: {' + '.join(change.name for change in changes)}")
        search.attempt(changes)
    found = sorted(search.fitting, key=lambda one: (one.cost, one.device_bytes))
    return MakeItFit(
        suggestions=tuple(found[:count]),
        closest=None if found else min(search.tried, key=lambda one: one.device_bytes, default=None),
        tried=len(search.tried) + len(search.refused),
        ruled_out=len(singles) + len(pairs) - len(possible),
        left=left,
        traces=search.traces.traces,
        refused=search.refused,
    )


class _Search:
    """What was tried so far."""

    def __init__(self, traces: SharedTraces, options: Mapping[str, Option]):
        self.traces, self.options = traces, options
        self.tried: list[Suggestion] = []
        self.refused: dict[str, str] = {}

    @property
    def fitting(self) -> list[Suggestion]:
        return [one for one in self.tried if one.simulation.fit.verdict is Verdict.FITS]

    def enough(self, changes: Sequence[Change], count: int) -> bool:
        """Whether one of the changes alone already suffices, or is refused, or as many cheaper sets fit."""
        names = {change.name for change in changes}
        if any({change.name for change in one.changes} < names for one in self.fitting) or names & {*self.refused}:
            return True
        least = sum(COSTS[change.kind] for change in changes)
        return sum(one.cost <= least for one in self.fitting) >= count

    def attempt(self, changes: tuple[Change, ...]) -> None:
        options = self.changed(changes)
        try:
            simulation = self.traces.simulate(options)
            percent = self._percent(options)
            self.tried.append(
                Suggestion(changes=changes, simulation=simulation.without_graph(), extra_flops_percent=percent)
            )
        except MetapeakError as error:
            self.refused[" + ".join(change.name for change in changes)] = str(error)

    def changed(self, changes: Iterable[Change]) -> dict[str, Option]:
        options = dict(self.options)
        for change in changes:
            options |= {name: Option(value=value, origin=_ORIGIN) for name, value in change.options.items()}
        return options

    def _percent(self, options: Mapping[str, Option]) -> float | None:
        """FLOPs that these options recompute beyond those that the question's own policy does."""
        policy = parse_policy(options["checkpointing"].value)
        same = options["checkpointing"].value == self.options["checkpointing"].value
        if same or isinstance(policy, (Nothing, Offload)):
            return 0.0
        return self.traces.extra_flops_percent(policy)


def _by_trace(sets: Sequence[tuple[Change, ...]], search: _Search) -> list[tuple[Change, ...]]:
    """The sets with those that share a trace one after another, traces in the order of their first use."""
    keys = [trace_key(search.changed(changes)) for changes in sets]
    first = {key: position for position, key in reversed([*enumerate(keys)])}
    order = sorted(range(len(sets)), key=lambda position: (first[keys[position]], position))
    return [sets[position] for position in order]


class _Floor:
    """The least that a set of changes can need: the model states that are alive together in the steady step, less what
    the changes can take off them. No activation, temporary or fragmentation counts.
    """

    def __init__(self, simulation: Simulation):
        rank, gpu = simulation.worst, simulation.fit.gpu
        liveness = rank.liveness
        states = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE)
        live = liveness.live_bytes(without=[category for category in Category if category not in states])
        largest = liveness.breakdown(int(live.argmax()))
        self._states = [largest[category] for category in states]
        self._room = gpu.usable_bytes - rank.overheads.low_bytes

    def allows(self, changes: Sequence[Change]) -> bool:
        return self.least(changes) <= self._room

    def least(self, changes: Sequence[Change]) -> float:
        """Bytes of model states that are left with these changes, at least."""
        least = 0.0
        for position, nbytes in enumerate(self._states):
            for change in changes:
                nbytes *= change.leaves[position]
            least += nbytes
        return least
