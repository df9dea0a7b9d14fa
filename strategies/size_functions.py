"""Batch and sequence for free: every storage of a step as an exact polynomial in both, from a few traces.

What it changes: nothing; a step at another size has the sizes that its own trace would have, or there is none.
Where each byte comes from: traces at the corners of a range and inside it. Their operations, births and deaths have to
be the same; then the bytes of a storage are a combination of 1, b, s, bs, s^2 and bs^2, of a length rounded up where a
kernel rounds it, found in integers and checked at points that the fit has not seen.
Where no polynomial fits, or a mask, window or kernel makes another graph inside the range, there is no answer, and
every size has to be traced. Outside the range there is none either.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from metapeak.tracer.errors import InputError
from metapeak.tracer.graph import StepGraph

# Lengths that kernels round a sequence up to; 1 is none, a negative one rounds one side of a square.
GRANULES = (1, 2, 4, 8, 16, 32, 64, 128, 256, -8, -16, -32, -64, -128)
# Lengths that are multiples of this and others can be different graphs: memory-efficient attention pads a mask's last
# dimension to it. Source: aten/src/ATen/native/transformers/attention.cpp (preprocess_mask).
ALIGNMENT = 16
# Powers of (batch, length) of the basis.
_POWERS = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))

Size = tuple[int, int]


class NotAPolynomial(InputError):
    """The step's sizes are no polynomial over this range; says why."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Polynomials:
    """Exact polynomials of (batch, length), many at once: `numerators` [count, terms] over `denominator` are the
    coefficients of the terms `powers` in (batch, length rounded up to the `granule` of each).
    """

    powers: tuple[Size, ...]
    numerators: np.ndarray
    denominator: int
    granule: np.ndarray

    def values(self, size: Size) -> np.ndarray:
        """The value of each at (batch, length), int64 [count]. Raises NotAPolynomial for a fraction."""
        total = np.zeros(len(self.granule), dtype=np.int64)
        for granule in np.unique(self.granule):
            rows = self.granule == granule
            total[rows] = self.numerators[rows] @ self.terms(size, int(granule))
        quotient, rest = np.divmod(total, self.denominator)
        if rest.any():
            raise NotAPolynomial(f"sizes at batch {size[0]} x length {size[1]} come out in fractions.")
        return quotient

    def terms(self, size: Size, granule: int) -> np.ndarray:
        return np.array(_terms(size, self.powers, granule), dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class SizeFunctions:
    """A step over a range of (batch, length), corners included: a graph whose sizes are functions of them.

    `storages` has the bytes of storages, `extents` what layouts are made of, each that differs once;
    `storage_of` and `extent_of` say which of them each storage and extent is; `traces` steps were recorded.
    """

    template: StepGraph
    least: Size
    most: Size
    aligned: bool | None
    storages: Polynomials
    extents: Polynomials
    storage_of: np.ndarray
    extent_of: np.ndarray
    traces: int

    def graph(self, size: Size) -> StepGraph:
        """The recorded step at that size; integers among the arguments are the template's. Raises InputError."""
        self._check(size)
        graph = copy.copy(self.template)
        graph.nbytes = self.storages.values(size)[self.storage_of].tolist()
        extents = iter(self.extents.values(size)[self.extent_of].tolist())
        graph.value_shape = [tuple(next(extents) for _ in shape) for shape in self.template.value_shape]
        graph.value_stride = [tuple(next(extents) for _ in stride) for stride in self.template.value_stride]
        graph.value_offset = list(extents)
        return graph

    def peak_bytes(self, sizes: Sequence[Size]) -> np.ndarray:
        """Largest sum of live bytes of traced storages (no workspaces) at each size, int64: thousands a second."""
        found = np.zeros(len(sizes), dtype=np.int64)
        for place, size in enumerate(sizes):
            self._check(size)
            live = sum(rows @ self.storages.terms(size, granule) for granule, rows in self._live_terms.items())
            found[place] = int(live.max()) // self.storages.denominator
        return found

    @functools.cached_property
    def _live_terms(self) -> dict[int, np.ndarray]:
        """Of each granule, the coefficients of the live bytes at the instants where a peak can be [instants, terms].

        Live bytes grow while nothing dies, so only the last of a run of births counts.
        """
        liveness = self.template.liveness()
        count = liveness.num_ops
        dies = np.zeros(count + 2, dtype=bool)
        dies[liveness.death] = True
        last = np.flatnonzero(np.append(dies[1:count], True))
        terms = {}
        for granule in np.unique(self.storages.granule):
            rows = np.flatnonzero((self.storages.granule == granule)[self.storage_of])
            of_rows = self.storages.numerators[self.storage_of[rows]]
            change = np.zeros((count + 2, len(self.storages.powers)), dtype=np.int64)
            np.add.at(change, liveness.birth[rows], of_rows)
            np.add.at(change, liveness.death[rows], -of_rows)
            terms[int(granule)] = np.cumsum(change, axis=0)[last]
        return terms

    def covers(self, size: Size) -> bool:
        """Whether (batch, length) is in the range."""
        inside = all(low <= value <= high for low, value, high in zip(self.least, size, self.most))
        return inside and is_of_kind(size[1], self.aligned)

    def _check(self, size: Size) -> None:
        if not self.covers(size):
            (b0, s0), (b1, s1) = self.least, self.most
            raise InputError(
                f"batch {size[0]} x length {size[1]} is outside what was traced: {b0} to {b1} x {s0} to {s1}."
            )


def is_of_kind(length: int, aligned: bool | None) -> bool:
    """Whether a length is a multiple of ALIGNMENT, or is none; None takes both."""
    return aligned is None or (length % ALIGNMENT == 0) == aligned


def size_functions(
    record: Callable[[Size], StepGraph], least: Size, most: Size, aligned: bool | None = None
) -> SizeFunctions:
    """The functions over batch and length from `least` to `most`; `record` traces the step at a size.

    A batch of one and larger ones are different graphs, so a range has one of them. `aligned` True takes lengths that
    ALIGNMENT divides, False the others: kernels pad their masks to it. Raises NotAPolynomial.
    """
    if least[0] == 1 < most[0]:
        raise NotAPolynomial("a batch of 1 takes another path than larger ones (dimensions of size 1): ask for each.")
    powers = tuple(
        power for power in _POWERS if not (power[0] and least[0] == most[0]) and not (power[1] and least[1] == most[1])
    )
    fitted, checked = _points(least, most, powers, aligned)
    sizes = [*fitted, *checked]
    template = record(sizes[0])
    nbytes, extents = [template.nbytes], [_extents(template)]
    for size in sizes[1:]:
        other = record(size)
        _check_same(template, other, sizes[0], size)
        nbytes.append(other.nbytes)
        extents.append(_extents(other))
    storages, storage_of = _fitted(np.array(nbytes, dtype=np.int64), fitted, checked, powers)
    shapes, extent_of = _fitted(np.array(extents, dtype=np.int64), fitted, checked, powers)
    return SizeFunctions(
        template=template,
        least=least,
        most=most,
        aligned=aligned,
        storages=storages,
        extents=shapes,
        storage_of=storage_of,
        extent_of=extent_of,
        traces=len(sizes),
    )


def _extents(graph: StepGraph) -> list[int]:
    """All shapes, strides and offsets of a step's values, in order."""
    layouts = (extent for column in (graph.value_shape, graph.value_stride) for entry in column for extent in entry)
    return [*layouts, *graph.value_offset]


def _fitted(seen: np.ndarray, fitted, checked, powers) -> tuple[Polynomials, np.ndarray]:
    """(polynomials of the columns of `seen` [sizes, columns] that differ, which of them each column is)."""
    columns, which = np.unique(seen, axis=1, return_inverse=True)
    count = columns.shape[1]
    granules = np.ones(count, dtype=np.int64)
    numerators = np.zeros((count, len(powers)), dtype=object)
    denominators = np.ones(count, dtype=object)
    left = np.arange(count)
    moves = len({length for _, length in fitted}) > 1
    for granule in GRANULES if moves else (1,):
        solved = _solve(fitted, powers, granule)
        if solved is None or not len(left):
            continue
        inverse, denominator = solved
        coefficients = columns[: len(fitted), left].T.astype(object) @ inverse.T
        good = np.ones(len(left), dtype=bool)
        for index, size in enumerate(checked, len(fitted)):
            terms = np.array(_terms(size, powers, granule), dtype=object)
            good &= (coefficients @ terms) == columns[index, left].astype(object) * denominator
        rows = left[good]
        numerators[rows], granules[rows], denominators[rows] = coefficients[good], granule, denominator
        left = left[~good]
    if len(left):
        example = ", ".join(
            f"{value:,} at {b} x {s}" for value, (b, s) in zip(columns[:, left[0]], (*fitted, *checked))
        )
        raise NotAPolynomial(f"a size is no polynomial of batch and length: {example}.")
    common = int(np.lcm.reduce(denominators)) if count else 1
    numerators = numerators * (common // denominators)[:, None]
    divisor = int(np.gcd.reduce(np.append(numerators.ravel(), common))) if count else 1
    polynomials = Polynomials(
        powers=powers,
        numerators=(numerators // divisor).astype(np.int64),
        denominator=common // divisor,
        granule=granules,
    )
    return polynomials, which.reshape(-1)


def _points(least: Size, most: Size, powers: Sequence[Size], aligned: bool | None) -> tuple[list[Size], list[Size]]:
    """(sizes to fit on, sizes to check the fit at): corners first, lengths of every kind of remainder."""
    (b0, s0), (b1, s1) = least, most
    batches = [b0] if b0 == b1 else [b0, b1]
    every = [length for length in range(s0, s1 + 1) if is_of_kind(length, aligned)]
    lengths = list(dict.fromkeys((every[0], every[len(every) // 2], every[-1]) if every else ()))
    fitted = [(batch, length) for batch in batches for length in lengths]
    if len(fitted) < len(powers):
        raise NotAPolynomial(f"the range from {least} to {most} has too few sizes to fit and check on.")
    odd = [every[(len(every) - 1) // 4], every[min(len(every) - 1, 3 * len(every) // 4 + 1)]]
    inner = [b0 + (b1 - b0) // 2] if b1 - b0 > 1 else batches
    checked = [(batch, length) for batch in inner for length in odd]
    return fitted, [size for size in dict.fromkeys(checked) if size not in fitted]


def _terms(size: Size, powers: Sequence[Size], granule: int) -> list[int]:
    """The terms of the basis at a size. A negative granule rounds one of the two lengths of a square only: a mask has
    as many rows as there are tokens, and its rows are padded.
    """
    batch, length = size
    rounded = -(-length // abs(granule)) * abs(granule)
    once = length if granule < 0 else rounded
    return [batch**b * (1, once, once * rounded)[s] for b, s in powers]


def _solve(fitted: Sequence[Size], powers: Sequence[Size], granule: int) -> tuple[np.ndarray, int] | None:
    """(integer inverse [terms, points], its denominator) of the basis at the points; None where they do not tell it."""
    rows = [[Fraction(value) for value in _terms(size, powers, granule)] for size in fitted]
    count = len(powers)
    if len(rows) != count:
        return None
    augmented = [row + [Fraction(int(i == j)) for j in range(count)] for i, row in enumerate(rows)]
    for column in range(count):
        pivot = next((row for row in range(column, count) if augmented[row][column]), None)
        if pivot is None:
            return None
        augmented[column], augmented[pivot] = augmented[pivot], augmented[column]
        scale = augmented[column][column]
        augmented[column] = [value / scale for value in augmented[column]]
        for row in range(count):
            if row != column and augmented[row][column]:
                factor = augmented[row][column]
                augmented[row] = [a - factor * b for a, b in zip(augmented[row], augmented[column])]
    inverse = [row[count:] for row in augmented]
    denominator = int(np.lcm.reduce([value.denominator for row in inverse for value in row]))
    return np.array([[int(value * denominator) for value in row] for row in inverse], dtype=object), denominator


def same_steps(one: StepGraph, other: StepGraph) -> bool:
    """Whether two graphs are the same operations on storages of the same lives."""
    try:
        _check_same(one, other, (0, 0), (0, 0))
    except NotAPolynomial:
        return False
    return True


def _check_same(one: StepGraph, other: StepGraph, size: Size, at: Size) -> None:
    """Raise NotAPolynomial where two steps are not the same operations on storages of the same lives."""
    named = [[graph.op_names[op] for op in graph.op] for graph in (one, other)]
    if named[0] != named[1]:
        first = next((a for a, b in zip(*named) if a != b), "the number of operations")
        raise NotAPolynomial(f"the step at {at} runs other operations than at {size}, from {first} on.")
    if one.birth != other.birth or one.death != other.death:
        raise NotAPolynomial(f"storages of the step at {at} live otherwise than at {size}.")
    if [len(shape) for shape in one.value_shape] != [len(shape) for shape in other.value_shape]:
        raise NotAPolynomial(f"tensors of the step at {at} have other dimensions than at {size}.")
