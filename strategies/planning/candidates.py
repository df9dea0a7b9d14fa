"""Candidates of a plan: every way to spread a step's tokens over a number of GPUs that the rules allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from metapeak.tracer.errors import InputError

# Tensor parallelism stays inside a machine: its all-reduces stand in the way of every layer.
MACHINE_GPUS = 8
MAX_MICRO_BATCH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One layout on `gpus` GPUs of a kind (an id of the catalogue), with micro-batch, accumulation and policy."""

    gpu: str
    gpus: int
    method: str
    tp: int
    dp_shard: int
    dp_replicate: int
    batch_size: int
    grad_accum: int
    checkpointing: str

    @property
    def data_parallel(self) -> int:
        return self.dp_shard * self.dp_replicate

    @property
    def options(self) -> dict[str, Any]:
        """What `metapeak estimate` takes, flags by name. Gradients are reduced after every micro-batch."""
        found: dict[str, Any] = {
            "gpu": self.gpu,
            "method": self.method,
            "batch_size": self.batch_size,
            "grad_accum": self.grad_accum,
            "checkpointing": self.checkpointing,
        }
        if self.dp_shard > 1:
            found["dp_shard"] = self.dp_shard
        if self.dp_replicate > 1:
            found["dp_replicate"] = self.dp_replicate
        if self.tp > 1:
            found["tp"] = self.tp
        if self.grad_accum > 1 and self.data_parallel > 1:
            found["sync_each_batch"] = True
        return found

    @property
    def layout(self) -> str:
        """The degrees that are more than one, as people write them."""
        named = {"replicate": self.dp_replicate, "shard": self.dp_shard, "tp": self.tp}
        return " x ".join(f"{name} {degree}" for name, degree in named.items() if degree > 1) or "one GPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """What a plan may choose, each with its values; a value that the user gave stands alone."""

    gpus: Sequence[int]
    methods: Sequence[str] = ("full",)
    policies: Sequence[str] = ("none", "full")
    tp: Sequence[int] | None = None
    dp_shard: Sequence[int] | None = None
    dp_replicate: Sequence[int] | None = None
    batch_size: Sequence[int] | None = None
    grad_accum: Sequence[int] | None = None


def candidates(
    gpu_ids: Sequence[str], free: Open, *, seq_len: int, tokens_per_batch: int | None
) -> Iterator[Candidate]:
    """Every candidate; degrees multiply to the GPUs, and micro-batches make the batch exactly.

    `tokens_per_batch` None: one micro-batch a step, whatever that makes.
    """
    for gpu in gpu_ids:
        for gpus in free.gpus:
            for tp in _divisors(gpus, free.tp, most=MACHINE_GPUS):
                for shard in _divisors(gpus // tp, free.dp_shard):
                    replicate = gpus // tp // shard
                    if free.dp_replicate is not None and replicate not in free.dp_replicate:
                        continue
                    for micro, accum in _batches(free, seq_len, tokens_per_batch, shard * replicate):
                        for method in free.methods:
                            for policy in free.policies:
                                yield Candidate(
                                    gpu=gpu, gpus=gpus, method=method, tp=tp, dp_shard=shard, dp_replicate=replicate,
                                    batch_size=micro, grad_accum=accum, checkpointing=policy,
                                )  # fmt: skip


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
