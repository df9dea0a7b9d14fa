"""Simulation: the answer, as plain values. Knows no torch and no rendering."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from metapeak.tracer.device.allocator_config import DEFAULT_CONFIG, AllocatorConfig
from metapeak.tracer.device.overheads import Overheads, device_bytes
from metapeak.tracer.device.reserve import AllocatorResult, reserve
from metapeak.tracer.gpus import Gpu
from metapeak.tracer.liveness import Category, Instant, Liveness, LiveTensor, PhasePeak


class Verdict(enum.Enum):
    """Whether the job fits a GPU."""

    FITS = "fits"
    BORDERLINE = "borderline"
    DOES_NOT_FIT = "does-not-fit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A resolved option: its value and who set it (default, command line, config file:line, model config, call)."""

    value: Any
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSummary:
    """The model that was traced. `parameters` counts elements, tied ones once."""

    id: str
    source: str
    architecture: str
    parameters: int
    trainable_parameters: int
    parameter_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class How:
    """How the answer was made: versions, seconds by stage, and the sentences that a report has to print. `cached`: it
    was made by an earlier call, whose seconds these are.
    """

    torch: str
    transformers: str
    seconds: Mapping[str, float]
    assumptions: tuple[str, ...]
    not_modelled: tuple[str, ...]
    cached: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineAction:
    """What a rank of a pipeline did from one instant to the next: `kind` F (forward), B (backward), I and W (backward
    for inputs and for weights), R (gradients are reduced and scaled), of a stage and a microbatch (-1: all).

    `peak_bytes` is the most that was live meanwhile, `end_bytes` what was left; `in_flight` the microbatches that went
    forward and not yet backward, over all stages of the rank.
    """

    iteration: int
    kind: str
    stage: int
    microbatch: int
    peak_bytes: int
    end_bytes: int
    in_flight: int


def played_actions(actions: Sequence[Sequence], liveness: Liveness) -> tuple[PipelineAction, ...]:
    """The actions of a recorded graph (see StepGraph.actions) with the bytes of a liveness of it."""
    live = liveness.live_bytes(without=[Category.WORKSPACE]) if actions else None
    played, in_flight = [], 0
    for (iteration, kind, stage, microbatch, begin), (*_, end) in pairwise(actions):
        if kind in ("start", "end"):
            continue
        begin, end = begin + 1, end + 1  # after the operations that mark the beginnings
        in_flight += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
        played.append(
            PipelineAction(
                iteration=iteration,
                kind=kind,
                stage=stage,
                microbatch=microbatch,
                peak_bytes=int(live[begin:end].max()) if end > begin else liveness.bytes_before(begin),
                end_bytes=liveness.bytes_before(end),
                in_flight=in_flight,
            )
        )
    return tuple(played)


@dataclass(frozen=True, kw_only=True, eq=False)
class RankResult:
    """One distinct rank: how many ranks are like it, its coordinates in the layout, its liveness, the settings of its
    caching allocator, and what its process takes of the GPU beside the allocator's segments. `not_shared`: requested
    bytes that more data-parallel ranks would not make less, by what they are, when they are most (several GPUs only).
    `host`: bytes of the host by phase (`host_bytes`, `pinned_bytes` of them pinned, `why`). `load_peak_bytes`: most
    bytes on the device while weights come (0: not known). `actions` of a pipeline's rank, in order.
    """

    rank: int
    count: int
    coordinates: Mapping[str, int]
    liveness: Liveness
    allocator: AllocatorConfig = DEFAULT_CONFIG
    overheads: Overheads = field(default_factory=Overheads)
    not_shared: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    load_peak_bytes: int = 0
    actions: tuple[PipelineAction, ...] = ()

    @functools.cached_property
    def reservation(self) -> AllocatorResult:
        """The step through the caching allocator, on a device without end: nothing goes back for want of memory."""
        return reserve(self.liveness, self.allocator)

    @property
    def peak_index(self) -> int:
        return self.liveness.peak_index()

    @property
    def requested_bytes(self) -> int:
        """Largest sum of live requested bytes."""
        return int(self.liveness.live_bytes().max())

    @property
    def allocated_bytes(self) -> int:
        """Largest sum of live allocator blocks, what torch.cuda.max_memory_allocated() prints.

        Blocks are multiples of 512 bytes, and in the large pool up to 1 MiB larger than that where the allocator does
        not split them.
        """
        return self.reservation.allocated_peak

    @property
    def reserved_bytes(self) -> int:
        """Largest sum of the allocator's segments, what torch.cuda.max_memory_reserved() prints."""
        return self.reservation.reserved_peak

    @property
    def device_range(self) -> tuple[int, int]:
        """(least, most) bytes that the driver shows: segments without and with fragmentation, and overheads."""
        return device_bytes((self.reservation.unfragmented_peak, self.reserved_bytes), self.overheads)

    @property
    def device_bytes(self) -> int:
        """What the driver is expected to show: segments as the allocator makes them, overheads as expected."""
        return self.reserved_bytes + self.overheads.expected_bytes

    def fit_on(self, gpu: Gpu | None) -> Fit | None:
        """The verdict for a GPU, None for none."""
        return verdict_for(gpu, self.device_range, self.device_bytes) if gpu else None

    @property
    def peak_at(self) -> Instant:
        return self.liveness.instant(self.peak_index)

    @property
    def breakdown(self) -> dict[Category, int]:
        """Requested bytes by category at the peak; sums to requested_bytes."""
        return self.liveness.breakdown(self.peak_index)

    @property
    def phases(self) -> list[PhasePeak]:
        """Traced bytes by phase; that of loading counts what weights need beside them while they come."""
        phases = self.liveness.phases()
        return [
            replace(phase, peak_bytes=max(phase.peak_bytes, self.load_peak_bytes)) if phase.phase == "load" else phase
            for phase in phases
        ]

    @property
    def steady_bytes(self) -> int:
        """Traced bytes between steps, workspaces not counted."""
        return self.liveness.steady_bytes()

    def largest(self, count: int = 10) -> list[LiveTensor]:
        return self.liveness.largest(self.peak_index, count)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnaskedPhase:
    """What a phase that nobody asked for would take of the worst rank: traced bytes, and bytes of the host."""

    phase: str
    peak_bytes: int
    end_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The verdict for one GPU. `headroom_bytes` is what stays free beside the expected device bytes (negative: what is
    missing); `device_range` the least and most that the job may take.
    """

    gpu: Gpu
    verdict: Verdict
    headroom_bytes: int
    device_range: tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """What `simulate` returns: the model, every resolved option, how it was done, each distinct rank, the verdict.

    `unasked` are phases that are shown beside what was asked for and counted in nothing else. `graph` is the recorded
    step. `suggestions`, where somebody asked for them, say in plain values what would fit, and
    `verified` what another way to the same bytes came to.
    """

    model: ModelSummary
    options: Mapping[str, Option]
    how: How
    ranks: tuple[RankResult, ...]
    fit: Fit | None = None
    unasked: tuple[UnaskedPhase, ...] = ()
    graph: Any = field(default=None, repr=False)
    suggestions: Mapping[str, Any] | None = field(default=None, repr=False)
    verified: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)

    def without_graph(self) -> Simulation:
        """Replayed through the allocator, without the recorded step, which holds most of the memory."""
        for rank in self.ranks:
            _ = rank.reservation
        return replace(self, graph=None)

    @property
    def worst(self) -> RankResult:
        """The rank that needs most of its GPU."""
        return max(self.ranks, key=lambda rank: rank.device_bytes)


def verdict_for(gpu: Gpu, device_range: tuple[int, int], expected_bytes: int) -> Fit:
    """Whether (least, most) device bytes fit what torch sees of the GPU, from which context and libraries are taken.

    The headroom is counted from `expected_bytes`.

    Fits: even the most. Does not fit: not even the least. Borderline: between, what the overheads' ranges leave open.
    """
    low, high = device_range
    if low > gpu.usable_bytes:
        verdict = Verdict.DOES_NOT_FIT
    elif high > gpu.usable_bytes:
        verdict = Verdict.BORDERLINE
    else:
        verdict = Verdict.FITS
    return Fit(gpu=gpu, verdict=verdict, headroom_bytes=gpu.usable_bytes - expected_bytes, device_range=device_range)
