"""Live bytes over the operations of a step, thinned out for drawing without losing a peak. Values only, no drawing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from metapeak.tracer.liveness import Category, Liveness, Phase


@dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """Requested bytes alive during some of the operations, exact at each of them.

    `index`: the operations that were kept, ascending. `nbytes`: bytes by category, shape [len(categories), len(index)];
    `categories` are those that ever hold anything. `num_ops` is the number of operations before thinning.
    """

    index: np.ndarray
    categories: tuple[Category, ...]
    nbytes: np.ndarray
    num_ops: int

    @property
    def total(self) -> np.ndarray:
        return self.nbytes.sum(axis=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Operations `start` to `end` (exclusive) of one phase of one iteration."""

    start: int
    end: int
    iteration: int
    phase: str

    @property
    def label(self) -> str:
        return f"{self.phase} {self.iteration}" if self.iteration else self.phase


def bytes_by_category(liveness: Liveness) -> np.ndarray:
    """Requested bytes alive during each operation, shape [number of categories, number of operations]."""
    change = np.zeros((len(Category), liveness.num_ops + 2), dtype=np.int64)
    np.add.at(change, (liveness.category, liveness.birth), liveness.nbytes)
    np.subtract.at(change, (liveness.category, liveness.death), liveness.nbytes)
    return np.cumsum(change, axis=1)[:, : liveness.num_ops]


def phase_spans(liveness: Liveness) -> list[Span]:
    """The phases in order of time."""
    key = liveness.op_iteration.astype(np.int64) * len(Phase) + liveness.op_phase
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    ends = np.append(starts[1:], liveness.num_ops)
    return [
        Span(
            start=int(start),
            end=int(end),
            iteration=int(liveness.op_iteration[start]),
            phase=Phase(int(liveness.op_phase[start])).label,
        )
        for start, end in zip(starts, ends)
    ]


def curves(liveness: Liveness, limit: int) -> Curves:
    """The curves at no more than about `limit` operations (all of them when there are fewer).

    No value is averaged: every point is an operation with its exact bytes. Kept are the first, last, highest and lowest
    operation of equal stretches, both ends of each phase, and for each phase where the total and each category peak.
    """
    table = bytes_by_category(liveness)
    total = table.sum(axis=0)
    used = [category for category in Category if table[category].any()]
    keep = {liveness.peak_index()} if liveness.num_ops else set()
    for span in phase_spans(liveness):
        keep.update((span.start, span.end - 1, span.start + int(total[span.start : span.end].argmax())))
        keep.update(span.start + int(table[category, span.start : span.end].argmax()) for category in used)
    index = keep_peaks(total, limit, keep)
    return Curves(index=index, categories=tuple(used), nbytes=table[used][:, index], num_ops=liveness.num_ops)


def keep_peaks(values: np.ndarray, limit: int, always: Iterable[int] = ()) -> np.ndarray:
    """Indices of at most about `limit` of the values, plus `always`: of each stretch the first, last, highest, lowest.

    >>> keep_peaks(np.array([0, 1, 9, 1, 0, 1, 0, 1, -5, 1, 0, 1]), 8).tolist()
    [0, 2, 5, 6, 7, 8, 11]
    """
    if len(values) <= limit:
        return np.arange(len(values))
    kept = set(always)
    edges = np.linspace(0, len(values), max(limit // 4, 1) + 1).astype(np.int64)
    for start, end in pairwise(edges.tolist()):
        stretch = values[start:end]
        kept.update((start, end - 1, start + int(stretch.argmax()), start + int(stretch.argmin())))
    return np.array(sorted(kept), dtype=np.int64)
