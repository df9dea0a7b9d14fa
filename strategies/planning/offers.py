"""What a candidate costs on the instances of the catalogue: machines that it needs, prices, billing, interruptions.

What it changes: nothing.
Where each number comes from: tracer/instances.py, dated list prices; a price here is what was listed on that day, not
an offer. Billing and notice: the providers' documentation as read on 2026-11-30.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metapeak.strategies.planning.candidates import MACHINE_GPUS, Candidate
from metapeak.strategies.planning.step_time import FABRIC_BYTES, StepTime, Work
from metapeak.strategies.serving.speed import STORAGE_BYTES_A_SECOND
from metapeak.tracer.instances import Instance

# How each cloud bills, and how it interrupts; what is from memory of their documentation is said so.
BILLING = {
    "aws": "per second, 60 s at least (from memory); spot ends with two minutes of notice",
    "gcp": "per second, one minute at least (from memory); spot ends with 30 s of notice",
    "azure": "per second against an hourly list; spot ends with 30 s of notice",
    "runpod": "per minute or second, sources disagree; interruptible at seconds of notice",
    "lambda": "per minute (from memory); no spot",
    "nebius": "per second (from memory); preemptible ones may be stopped at any time",
    "oci": "per second, one minute at least (from memory); preemptible VMs with 30 s of notice",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """`machines` of one instance type for a candidate; USD per million tokens, (least, most), on demand and on spot."""

    instance: Instance
    machines: int
    on_demand: tuple[float, float] | None
    spot: tuple[float, float] | None

    @property
    def price_hour(self) -> float | None:
        price = self.instance.price_hour
        return None if price is None else price * self.machines


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruption:
    """What one interruption costs in seconds, (least, most): half an interval of work, and reading a checkpoint again;
    and what keeping one costs each time.
    """

    checkpoint_bytes: int
    lost_seconds: tuple[float, float]
    write_seconds: tuple[float, float]


def fabric_of(instances: Sequence[Instance], gpu: str) -> tuple[float, float]:
    """Bytes a second between machines for one GPU, (least, most), over the clustered instances with that GPU."""
    rates = [
        item.fabric_bytes / item.count
        for item in instances
        if item.gpu == gpu and item.is_clustered and item.fabric_bytes and item.count >= MACHINE_GPUS
    ]
    return (min(rates), max(rates)) if rates else FABRIC_BYTES


def offers(instances: Sequence[Instance], one: Candidate, time: StepTime, seq_len: int) -> list[Offer]:
    """What the candidate costs on every instance that can run it, cheapest on-demand first.

    Several machines need a fabric that training spreads over, as many GPUs in each as step_time.py takes for a machine,
    and to be filled; one machine may have GPUs to spare, which are paid.
    """
    tokens = one.batch_size * one.grad_accum * one.data_parallel * seq_len
    found = []
    for item in instances:
        if item.gpu != one.gpu or not item.whole:
            continue
        machines = max(1, -(-one.gpus // int(item.count)))
        if machines > 1 and (not item.is_clustered or item.count < MACHINE_GPUS or one.gpus % int(item.count)):
            continue
        found.append(
            Offer(
                instance=item,
                machines=machines,
                on_demand=_per_million(item.price_hour, machines, time, tokens),
                spot=_per_million(item.spot_price_hour, machines, time, tokens),
            )
        )
    return sorted(found, key=lambda offer: (offer.on_demand is None, offer.on_demand or (0, 0), offer.instance.name))


def _per_million(price: float | None, machines: int, time: StepTime, tokens: int) -> tuple[float, float] | None:
    if price is None:
        return None
    return tuple(price * machines / 3600 * seconds / tokens * 1e6 for seconds in time.seconds)


def interruption(work: Work, machines: int, interval_minutes: float) -> Interruption:
    """What an interruption costs a job that keeps a checkpoint every `interval_minutes`, each machine its share."""
    slow, fast = (work.kept_bytes / machines / rate for rate in STORAGE_BYTES_A_SECOND)
    half = interval_minutes * 60 / 2
    return Interruption(
        checkpoint_bytes=work.kept_bytes,
        lost_seconds=(half + fast, half + slow),
        write_seconds=(fast, slow),
    )
