"""How fast at most, and what a token costs: bounds from bandwidth and arithmetic, as ranges; no kernel is timed.

What it changes: nothing.
Where each number comes from: a decoded token of every sequence reads the weights once, and each sequence's own cache;
the embedding is read by rows, and of a mixture's experts those that the batch routes to, spread evenly. A prefilled
token costs the traced forward's FLOPs by torch's formulas. The data sheet's bandwidth and dense FLOPs, times a range of
what kernels reach, give the range. Prices: tracer/instances.py.
Not modelled: time of communication, scheduling, sampling; speculative decoding; prefix caching; work of batches that
mix prefill and decode.
Sources: the roofline of "LLM Inference Unveiled" (arXiv 2402.16363), section 2; data sheets in
tracer/catalogue/gpus.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metapeak.tracer.gpus import Gpu
from metapeak.tracer.instances import Instance, instances_with

# What kernels reach of the data sheet, assumed: memory-bound decode and compute-bound prefill.
BANDWIDTH_REACHED = (0.5, 0.9)
FLOPS_REACHED = (0.3, 0.7)
# Reading a checkpoint at start, bytes a second: network storage, local NVMe. Assumed.
STORAGE_BYTES_A_SECOND = (0.5e9, 5e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one decoded token of a batch reads on a rank, and what a prefilled token computes on all ranks.

    `always_bytes` of weights whatever the batch, `expert_bytes` of all experts, of which a token takes `active` of
    `experts`.
    """

    always_bytes: int
    expert_bytes: int = 0
    experts: int = 1
    active: int = 1
    prefill_flops: float = 0.0

    def weights_read(self, batch: int) -> float:
        """Bytes of weights that a step of `batch` sequences reads, routing spread evenly.

        >>> Traffic(always_bytes=100, expert_bytes=800, experts=8, active=2).weights_read(1)
        300.0
        """
        if not self.expert_bytes:
            return float(self.always_bytes)
        touched = 1 - (1 - self.active / self.experts) ** batch
        return self.always_bytes + self.expert_bytes * touched


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Tokens a second, (least, most): one sequence decoding, `batch` of them, prefill; seconds of a cold start."""

    batch: int
    decode_one: tuple[float, float]
    decode_batch: tuple[float, float]
    prefill: tuple[float, float] | None
    cold_start_seconds: tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """An instance at the batch's speed: USD per million decoded tokens on demand and on spot, (least, most); the share
    of the instance that the ranks take is what is paid.
    """

    instance: Instance
    replicas: int
    on_demand: tuple[float, float]
    spot: tuple[float, float] | None


def speed_of(
    gpu: Gpu, traffic: Traffic, *, sequence_bytes: int, batch: int, ranks: int, dtype: str, checkpoint_bytes: int
) -> Speed | None:
    """Bounds on one replica of `ranks` GPUs; None for a GPU whose bandwidth is not known.

    `sequence_bytes` is a sequence's cache on a rank, `batch` the sequences at once, `checkpoint_bytes` of all ranks.
    """
    if gpu.bandwidth_bytes is None:
        return None

    def decode(count: int) -> tuple[float, float]:
        read = traffic.weights_read(count) + count * sequence_bytes
        return tuple(reached * gpu.bandwidth_bytes * count / read for reached in BANDWIDTH_REACHED)

    flops = gpu.dense_flops.get(dtype) or gpu.dense_flops.get("fp16")
    prefill = None
    if flops and traffic.prefill_flops:
        prefill = tuple(reached * flops * ranks / traffic.prefill_flops for reached in FLOPS_REACHED)
    slow, fast = STORAGE_BYTES_A_SECOND
    return Speed(
        batch=batch,
        decode_one=decode(1),
        decode_batch=decode(max(batch, 1)),
        prefill=prefill,
        cold_start_seconds=(checkpoint_bytes / fast, checkpoint_bytes / slow),
    )


def costs_of(gpu: Gpu, speed: Speed, ranks: int) -> list[Cost]:
    """What a million decoded tokens cost on every instance with that GPU, cheapest first.

    An instance with more GPUs than a replica takes holds several; what is left over is paid, too.
    """
    found = []
    for instance in instances_with(gpu, ranks):
        replicas = int(instance.count) // ranks
        found.append(
            Cost(
                instance=instance,
                replicas=replicas,
                on_demand=_per_million(instance.price_hour, replicas, speed.decode_batch),
                spot=_per_million(instance.spot_price_hour, replicas, speed.decode_batch)
                if instance.spot_price_hour
                else None,
            )
        )
    return sorted(found, key=lambda cost: (cost.on_demand[0], cost.instance.price_hour))


def _per_million(price_hour: float, replicas: int, tokens_a_second: Sequence[float]) -> tuple[float, float]:
    slow, fast = tokens_a_second
    return tuple(price_hour / (3600 * replicas * speed) * 1e6 for speed in (fast, slow))


def egress_cost(tokens: int, price_per_gb: float, bytes_a_token: float = 4.0) -> float:
    """USD for sending `tokens` as text, at about four bytes a token.

    >>> egress_cost(10**9, 0.09)
    0.36
    """
    return round(tokens * bytes_a_token / 1e9 * price_per_gb, 9)
