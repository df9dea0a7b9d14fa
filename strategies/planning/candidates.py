"""Candidates of a plan: every way to spread a step's tokens over a number of GPUs that the rules allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from metapeak.tracer.errors import InputError

# Tensor parallelism stays inside a machine: its all-reduces stand in the way of every layer.
MACHINE_GPUS = 8
MAX_MICRO_BATCH = 64
# A part of a sequence shorter than this is not worth a ring of messages in every layer.
LEAST_PART_TOKENS = 1024
# A stage that waits for more than this share of a step is not worth a pipeline: bubbles = (pp - 1) / microbatches.
MOST_BUBBLES = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One layout on `gpus` GPUs of a kind (an id of the catalogue), with micro-batch, accumulation and policy.

    In a pipeline, `grad_accum` are its microbatches. `ep` spreads experts over ranks of the other degrees.
    """

    gpu: str
    gpus: int
    method: str
    tp: int
    dp_shard: int
    dp_replicate: int
    batch_size: int
    grad_accum: int
    checkpointing: str
    pp: int = 1
    cp: int = 1
    ep: int = 1
    schedule: str | None = None

    @property
    def data_parallel(self) -> int:
        return self.dp_shard * self.dp_replicate

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP runs it, with parameters cast as it casts them."""
        return self.dp_shard * self.cp > 1 or (self.dp_replicate > 1 and self.tp * self.pp * self.ep > 1)

    @property
    def options(self) -> dict[str, Any]:
        """What `metapeak estimate` takes, flags by name. Gradients are reduced after every micro-batch."""
        found: dict[str, Any] = {
            "gpu": self.gpu,
            "method": self.method,
            "batch_size": self.batch_size,
            "checkpointing": self.checkpointing,
        }
        if self.pp > 1:
            found |= {"pp": self.pp, "schedule": self.schedule, "microbatches": self.grad_accum}
        else:
            found["grad_accum"] = self.grad_accum
        if self.is_sharded:
            found["dp_shard"] = self.dp_shard
        for name in ("dp_replicate", "tp", "cp", "ep"):
            if getattr(self, name) > 1:
                found[name] = getattr(self, name)
        if self.grad_accum > 1 and self.pp == 1 and self.data_parallel * self.cp > 1:
            found["sync_each_batch"] = True
        return found

    @property
    def layout(self) -> str:
        """The degrees that are more than one, as people write them."""
        named = {"replicate": self.dp_replicate, "shard": self.dp_shard, "tp": self.tp, "pp": self.pp, "cp": self.cp}
        text = " x ".join(f"{name} {degree}" for name, degree in named.items() if degree > 1) or "one GPU"
        return text + (f", ep {self.ep}" if self.ep > 1 else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What of a model decides which degrees it can have: `blocks`, attention `heads` that tp has to divide, `experts`
    that ep has to divide (0: none, or none that can be spread), whether it has a plan for tensor parallelism, and
    whether it can be cut along the sequence and into stages.
    """

    blocks: int
    heads: int
    experts: int
    has_tp: bool
    is_causal_lm: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """What a plan may choose, each with its values; a value that the user gave stands alone."""

    gpus: Sequence[int]
    methods: Sequence[str] = ("full",)
    policies: Sequence[str] = ("none", "full")
    schedules: Sequence[str] = ("1f1b",)
    tp: Sequence[int] | None = None
    pp: Sequence[int] | None = None
    cp: Sequence[int] | None = None
    ep: Sequence[int] | None = None
    dp_shard: Sequence[int] | None = None
    dp_replicate: Sequence[int] | None = None
    batch_size: Sequence[int] | None = None
    grad_accum: Sequence[int] | None = None


def candidates(
    gpu_ids: Sequence[str],
    free: Open,
    model: Model | None = None,
    *,
    seq_len: int,
    tokens_per_batch: int | None,
    excluded: Counter[str] | None = None,
) -> Iterator[Candidate]:
    """Every candidate; degrees multiply to the GPUs, and micro-batches make the batch exactly.

    `tokens_per_batch` None: one micro-batch a step, whatever that makes. `excluded` counts the candidates that the
    rules of `refusal` leave out, by rule.
    """
    for gpu in gpu_ids:
        for gpus in free.gpus:
            for tp, pp, cp, shard, replicate in _degrees(gpus, free):
                for ep in _expert_degrees(free, model, shard * cp * tp):
                    for micro, accum in _batches(free, seq_len, tokens_per_batch, shard * replicate):
                        for schedule in free.schedules if pp > 1 else (None,):
                            for method in free.methods:
                                for policy in free.policies:
                                    one = Candidate(
                                        gpu=gpu, gpus=gpus, method=method, tp=tp, pp=pp, cp=cp, ep=ep,
                                        dp_shard=shard, dp_replicate=replicate, batch_size=micro, grad_accum=accum,
                                        checkpointing=policy, schedule=schedule,
                                    )  # fmt: skip
                                    rule = refusal(one, model, free, seq_len)
                                    if rule is None:
                                        yield one
                                    elif excluded is not None:
                                        excluded[rule] += 1


def refusal(one: Candidate, model: Model | None, free: Open, seq_len: int) -> str | None:
    """The rule that leaves a candidate out, or None. Those of `simulate` come first, then those that save time; a
    degree that the user gave is not left out for the latter.
    """
    virtual = int(one.schedule.partition(":")[2] or 1) if one.schedule else 1
    if one.tp > 1 and one.method != "full":
        return "tp has no plan for adapters"
    if one.pp > 1 and one.cp * one.ep > 1:
        return "pp with cp or ep is left out of plans: such a step can take minutes to trace"
    if one.ep > 1 and one.method != "full":
        return "ep has no plan for adapters"
    if one.cp > 1 and seq_len % (2 * one.cp):
        return "seq_len / (2 x cp) is no whole number"
    if one.pp > 1 and one.grad_accum < one.pp:
        return "a pipeline needs as many microbatches as ranks"
    if one.pp > 1 and virtual > 1 and one.grad_accum % max(1, one.grad_accum // one.pp):
        return "interleaved stages need microbatches that rounds divide"
    if model is not None:
        if one.tp > 1 and not model.has_tp:
            return "the model has no plan for tp"
        if one.tp > 1 and model.heads % one.tp:
            return "attention heads / tp is no whole number"
        if one.pp * one.cp > 1 and not model.is_causal_lm:
            return "pp and cp need a causal language model"
        if one.pp * virtual > max(model.blocks, 1):
            return "more stages than blocks"
    if one.cp > 1 and free.cp is None and seq_len // one.cp < LEAST_PART_TOKENS:
        return f"cp would leave a rank fewer than {LEAST_PART_TOKENS} tokens"
    if one.pp > 1 and free.pp is None and one.gpus <= MACHINE_GPUS:
        return "a pipeline inside one machine, where messages of tp and shards are fast (--pp asks for it)"
    if one.pp > 1 and free.pp is None and (one.pp - 1) / (virtual * one.grad_accum) > MOST_BUBBLES:
        return "a pipeline that waits longer than it works"
    return None


def _degrees(gpus: int, free: Open) -> Iterator[tuple[int, int, int, int, int]]:
    """(tp, pp, cp, dp_shard, dp_replicate) that multiply to the GPUs."""
    for tp in _divisors(gpus, free.tp, most=MACHINE_GPUS):
        for pp in _divisors(gpus // tp, free.pp):
            for cp in _divisors(gpus // tp // pp, free.cp):
                for shard in _divisors(gpus // tp // pp // cp, free.dp_shard):
                    replicate = gpus // tp // pp // cp // shard
                    if free.dp_replicate is None or replicate in free.dp_replicate:
                        yield tp, pp, cp, shard, replicate


def _expert_degrees(free: Open, model: Model | None, ranks: int) -> list[int]:
    """Degrees that spread experts over `ranks` ranks evenly; 1 alone for a model without experts to spread."""
    experts = model.experts if model is not None else 0
    if not experts:
        return [1] if free.ep is None else list(free.ep)
    return [ep for ep in _divisors(ranks, free.ep) if experts % ep == 0]


def _divisors(number: int, given: Sequence[int] | None, most: int | None = None) -> list[int]:
    found = [degree for degree in range(1, number + 1) if number % degree == 0]
    return [degree for degree in found if (degree in given if given is not None else most is None or degree <= most)]


def _batches(free: Open, seq_len: int, tokens: int | None, data_parallel: int) -> list[tuple[int, int]]:
    """(micro-batch, accumulation) pairs that make the tokens of a batch."""
    micros = free.batch_size or [1 << power for power in range(MAX_MICRO_BATCH.bit_length())]
    if tokens is None:
        return [(micro, accum) for micro in micros for accum in (free.grad_accum or [1])]
    pairs = []
    for micro in micros:
        accum, rest = divmod(tokens, micro * seq_len * data_parallel)
        if accum and not rest and (free.grad_accum is None or accum in free.grad_accum):
            pairs.append((micro, accum))
    return pairs


def counts_of(text: str) -> list[int]:
    """Numbers of GPUs: 8, or 1,2,4, or 8..64 for the doublings of the first up to the last.

    Raises InputError.

    >>> counts_of("8..64"), counts_of("1,6"), counts_of("1..6")
    ([8, 16, 32, 64], [1, 6], [1, 2, 4, 6])
    """
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        if not first.isdigit() or (dots and not last.isdigit()) or int(first) < 1:
            raise InputError(f"--gpus {text!r} is no number of GPUs, list or range; as 8, 1,2,4 or 8..64.")
        count, end = int(first), int(last or first)
        if end < count:
            raise InputError(f"--gpus {part.strip()}: the range ends before it begins.")
        while count < end:
            found.append(count)
            count *= 2
        found.append(end)
    return sorted(set(found))
