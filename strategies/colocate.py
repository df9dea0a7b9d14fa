"""A trainer and an engine on one card, in one process: the most that both take at any instant.

What it changes: nothing; it lays a training estimate and a serving one over each other in time.
Where each byte comes from: the trainer's share of an instant from its estimate (segments at the peak of its steps,
blocks between steps), the engine's from `serve` (weights, cache, prefill, charges). Awake it keeps weights, cache and
graphs also while the trainer steps. Asleep (vLLM's sleep level 1 or 2) it has neither weights nor cache, but its graphs
and libraries; level 1 keeps the weights in pinned memory of the host. Before it wakes the trainer empties its cache:
then its blocks count, and up to all its segments where fragmentation holds them; without sleep the segments stay. The
weights go over one by one, FSDP's gathered. `offload_trainer`: the trainer's states go to the host while the engine
generates (verl's param_offload and optimizer_offload). Context and libraries are the process's and count once.
Not modelled: rollouts and rewards that the trainer keeps on the card, a reference model.
Sources: TRL 1.16 generation/vllm_generation.py (_init_vllm, sync_weights, generate: empty_cache, wake_up by tags,
sleep(level=2)), trainer/grpo_config.py; vLLM docs/features/sleep_mode.md; verl workers/fsdp_workers.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from metapeak.strategies.serving.engines import total_of
from metapeak.tracer.errors import InputError
from metapeak.tracer.liveness import Category
from metapeak.tracer.simulation import Fit, Simulation, verdict_for

if TYPE_CHECKING:
    from metapeak.strategies.serving import Serving

# Engines that run inside a trainer's process and what gpu_memory_utilization trainers give them.
ENGINES = ("vllm",)
MEMORY_FRACTION = 0.3
SLEEP_LEVELS = (0, 1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """(least, expected, most) bytes that somebody takes of the card at an instant, and what they are."""

    low_bytes: int
    expected_bytes: int
    high_bytes: int
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Instant:
    """An instant of the loop: its name and the shares of trainer, engine and process."""

    name: str
    trainer: Share
    engine: Share
    process: Share

    @property
    def shares(self) -> tuple[Share, ...]:
        return self.trainer, self.engine, self.process

    @property
    def device_bytes(self) -> int:
        return sum(share.expected_bytes for share in self.shares)

    @property
    def device_range(self) -> tuple[int, int]:
        return sum(share.low_bytes for share in self.shares), sum(share.high_bytes for share in self.shares)


@dataclass(frozen=True, kw_only=True, eq=False)
class Colocation:
    """What `colocate` returns: the instants in order, the one that takes most, the verdict for it, and the host's bytes
    of what was put there.
    """

    trainer: Simulation
    serving: Serving
    instants: tuple[Instant, ...]
    fit: Fit
    host_bytes: int
    assumptions: tuple[str, ...]

    @property
    def peak(self) -> Instant:
        return max(self.instants, key=lambda instant: instant.device_bytes)


def check_colocation(engine: str, sleep: int, offload_trainer: bool) -> None:
    """Raise InputError for an engine, a sleep level or an offload that cannot be."""
    if engine not in ENGINES:
        raise InputError(f"{engine} does not run inside a trainer's process; known to: {', '.join(ENGINES)}.")
    if sleep not in SLEEP_LEVELS:
        raise InputError(f"sleep level {sleep}: vLLM has 1 (weights to the host) and 2 (weights dropped); 0 is awake.")
    if offload_trainer and not sleep:
        raise InputError(
            "offload_trainer without a sleeping engine: the steps would still share the card. Give --sleep 2."
        )


def colocate(trainer: Simulation, serving: Serving, *, sleep: int = 0, offload_trainer: bool = False) -> Colocation:
    """Trainer and engine over time on the engine's GPU. Raises InputError, see `check_colocation`."""
    check_colocation(serving.spec.engine, sleep, offload_trainer)
    rank, engine = trainer.worst, serving.worst
    low, expected, high = total_of((*engine.charges, *serving.budget.outside))
    weights, cache, prefill = engine.weights_bytes, max(0, engine.kv_cache_bytes), serving.prefill_activation_bytes
    parameter, parameters = _parameters(trainer)

    def runs(nbytes: int, what: str) -> Share:
        return Share(low_bytes=nbytes + low, expected_bytes=nbytes + expected, high_bytes=nbytes + high, what=what)

    def holds(nbytes: int, what: str, most: int | None = None) -> Share:
        return Share(low_bytes=nbytes, expected_bytes=nbytes, high_bytes=max(nbytes, most or 0), what=what)

    reservation = rank.reservation
    steps = Share(
        low_bytes=reservation.unfragmented_peak,
        expected_bytes=rank.reserved_bytes,
        high_bytes=rank.reserved_bytes,
        what=f"the step's segments, at most in {rank.peak_at.phase}",
    )
    between = holds(reservation.allocated_end, "parameters and optimizer states", reservation.reserved_end)
    away = holds(0, "offloaded to the host")
    loaded = holds(_loaded_bytes(trainer), "the model as it is loaded")
    awake = runs(weights + cache, "weights, cache and graphs")
    full = runs(weights + cache + prefill, "weights, cache, graphs and a prefill")
    process = Share(
        low_bytes=rank.overheads.low_bytes,
        expected_bytes=rank.overheads.expected_bytes,
        high_bytes=rank.overheads.high_bytes,
        what="context and libraries",
    )
    if sleep:
        resting = runs(0, f"asleep (level {sleep}): graphs and libraries")
        woken = runs(weights + parameter, "weights, and the tensor that is on its way")
        sends = holds(parameters, "parameters") if offload_trainer else between
        shares = [
            ("engine starts", loaded, full),
            ("training step", steps, resting),
            ("weights go over", sends, woken),
            ("generation", away if offload_trainer else between, full),
        ]
    else:
        kept = holds(rank.reserved_bytes, "the segments of its steps, which stay")
        sent = runs(weights + cache + parameter, "weights, cache, graphs, and the tensor that is on its way")
        shares = [
            ("engine starts", loaded, full),
            ("training step", steps, awake),
            ("weights go over", kept, sent),
            ("generation", kept, full),
        ]
    instants = tuple(Instant(name=name, trainer=mine, engine=its, process=process) for name, mine, its in shares)
    lows, highs = zip(*(instant.device_range for instant in instants))
    return Colocation(
        trainer=trainer,
        serving=serving,
        instants=instants,
        fit=verdict_for(serving.gpu, (max(lows), max(highs)), max(instant.device_bytes for instant in instants)),
        host_bytes=weights * (sleep == 1) + reservation.allocated_end * offload_trainer,
        assumptions=_assumptions(sleep, offload_trainer, trainer, serving),
    )


def _parameters(trainer: Simulation) -> tuple[int, int]:
    """(bytes of the largest whole parameter, bytes of all on this rank)."""
    liveness = trainer.worst.liveness
    rows = np.flatnonzero((liveness.category == Category.PARAMETER) & (liveness.nbytes > 0))
    before = rows[liveness.op_iteration[liveness.birth[rows]] == 0]
    largest = max((int(liveness.nbytes[row]) for row in rows), default=0)
    return largest, int(liveness.nbytes[before].sum())


def _loaded_bytes(trainer: Simulation) -> int:
    return next((phase.end_bytes for phase in trainer.worst.phases if phase.phase == "load"), 0)


def _assumptions(sleep: int, offload_trainer: bool, trainer: Simulation, serving: Serving) -> tuple[str, ...]:
    said = [
        "one process: context and libraries count once, and the engine starts after the trainer's model is loaded",
        f"the engine sleeps while the trainer steps (level {sleep}), and the trainer empties its cache before it wakes"
        if sleep
        else "the engine keeps weights and cache while the trainer steps (--sleep 2 for vLLM's sleep mode)",
    ]
    if offload_trainer:
        said.append("the trainer's states are on the host while the engine generates")
    return (*said, *(f"engine: {sentence}" for sentence in serving.how.assumptions), *trainer.how.assumptions)
