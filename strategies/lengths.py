"""A distribution of peaks in place of one number: the batches that a file of sequence lengths makes.

What it changes: nothing; the step of every batch has the sizes that its own trace would have (size_functions.py).
Where each byte comes from: traces at the ends of a range of lengths and inside it; where the graph changes inside (a
sliding window, a mask, a kernel's switch) the range is cut there, and what is left of few sizes is traced.
Padded: sequences in the file's order, `batch_size` of them padded to the longest. Packed: the same ones end to end in
one row without padding.
Not modelled: that an allocator which has seen other lengths before has holes of their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from metapeak.strategies.request import gpu_of, lifecycle_of, simulate_resolved, strategies_of
from metapeak.strategies.size_functions import (
    NotAPolynomial,
    Size,
    SizeFunctions,
    is_of_kind,
    same_steps,
    size_functions,
)
from metapeak.tracer.errors import InputError
from metapeak.tracer.graph import StepGraph
from metapeak.tracer.simulation import Option, Simulation

# Percents of the steps whose peaks are reported, each through the allocator.
PERCENTILES = (50, 90, 99, 100)
# A file that needs more traces than this is refused.
MOST_TRACES = 64


class Steps:
    """The step of `reference` at any (batch, length) of ranges that are asked for, from as few traces as are needed."""

    def __init__(
        self,
        reference: str,
        options: Mapping[str, Option],
        progress: Callable[[str], None] = lambda what: None,
    ):
        self._reference, self._options, self._progress = reference, options, progress
        self._traced: dict[Size, StepGraph] = {}
        self._pieces: list[SizeFunctions] = []
        self._base: Simulation | None = None
        self.reasons: list[str] = []  # why ranges were cut

    @property
    def traces(self) -> int:
        return len(self._traced)

    @property
    def ranges(self) -> list[tuple[Size, Size]]:
        return [(piece.least, piece.most) for piece in self._pieces]

    def cover(self, sizes: Sequence[Size]) -> None:
        """Trace what is needed for these sizes. Raises InputError for a step that would take too many traces."""
        for batch in sorted({batch for batch, _ in sizes}):
            lengths = sorted({length for other, length in sizes if other == batch})
            self._cover_lengths(batch, lengths)

    def _cover_lengths(self, batch: int, lengths: list[int], aligned: bool | None = None) -> None:
        if not lengths:
            return
        first, last = lengths[0], lengths[-1]
        if len(lengths) <= 5:
            for length in lengths:
                self._record((batch, length))
            return
        try:
            self._pieces.append(size_functions(self._record, (batch, first), (batch, last), aligned))
            return
        except NotAPolynomial as reason:
            self.reasons.append(f"{first} to {last}: {reason}")
        if aligned is None:
            for kind in (True, False):
                self._cover_lengths(batch, [one for one in lengths if is_of_kind(one, kind)], kind)
            return
        cut = self._cut(batch, lengths)
        self._cover_lengths(batch, lengths[:cut], aligned)
        self._cover_lengths(batch, lengths[cut:], aligned)

    def _cut(self, batch: int, lengths: list[int]) -> int:
        """Where the step becomes another one than the first length's; the middle, where the ends are alike."""
        first = self._record((batch, lengths[0]))
        low, high = 0, len(lengths) - 1
        if same_steps(first, self._record((batch, lengths[-1]))):
            return len(lengths) // 2
        while high - low > 1:
            middle = (low + high) // 2
            same = same_steps(first, self._record((batch, lengths[middle])))
            low, high = (middle, high) if same else (low, middle)
        return high

    def _record(self, size: Size) -> StepGraph:
        if size not in self._traced:
            if self.traces >= MOST_TRACES:
                raise InputError(
                    f"This step's sizes follow no polynomial of the length, and {MOST_TRACES} traces did not "
                    f"cover the file. Last: {self.reasons[-1] if self.reasons else 'no range'}"
                )
            self._progress(f"tracing batch {size[0]} x length {size[1]}")
            batch = {"batch_size": size[0], "seq_len": size[1]}
            options = {**self._options, **{name: Option(value=value, origin="file") for name, value in batch.items()}}
            simulation = simulate_resolved(self._reference, options)
            if len(simulation.ranks) > 1:
                raise InputError("--seq-lens takes jobs whose ranks are alike.")
            self._base = self._base or simulation
            self._traced[size] = simulation.graph
        return self._traced[size]

    def graph(self, size: Size) -> StepGraph:
        """The recorded step at a size that `cover` was told of."""
        if size in self._traced:
            return self._traced[size]
        for piece in self._pieces:
            if piece.covers(size):
                return piece.graph(size)
        raise InputError(f"batch {size[0]} x length {size[1]} was not traced.")

    def peak_bytes(self, sizes: Sequence[Size]) -> dict[Size, int]:
        """Largest sum of live bytes of traced storages at each size."""
        found: dict[Size, int] = {}
        for piece in self._pieces:
            inside = [size for size in sizes if piece.covers(size)]
            found.update(zip(inside, piece.peak_bytes(inside).tolist()))
        for size in sizes:
            if size not in found:
                found[size] = int(self.graph(size).liveness().live_bytes().max())
        return found

    def simulate(self, size: Size) -> Simulation:
        """What `simulate` answers at that size, without another trace: workspaces, allocator, verdict."""
        from metapeak.tracer.kernels import KernelWorkspaces, device_of

        graph, gpu = self.graph(size), gpu_of(self._options)
        liveness = graph.liveness()
        for strategy in strategies_of(self._options):
            liveness = strategy.rewrite(liveness, graph)
        workspaces = KernelWorkspaces.of(graph, device_of(gpu))
        rank = replace(self._base.ranks[0], liveness=workspaces.added_to(liveness))
        return replace(self._base, ranks=(rank,), fit=rank.fit_on(gpu), graph=graph)


@dataclass(frozen=True, kw_only=True, eq=False)
class Peaks:
    """The steps of one way to batch: how many have each size, the peak of each (traced storages), and of PERCENTILES
    the size at which that share of the steps has no higher peak, with its simulation.
    """

    name: str
    counts: Mapping[Size, int]
    peak_bytes: Mapping[Size, int]
    percentiles: Sequence[tuple[int, Size, Simulation]]
    fitting: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class LengthDistribution:
    """What the file's lengths make: padded and packed batches (None with the reason where those cannot be traced); how
    many sequences were left over at its end.
    """

    sequences: int
    left_over: int
    padding_percent: float
    padded: Peaks
    packed: Peaks | None
    packed_refused: str | None
    traces: int
    reasons: Sequence[str] = field(default=())


def distribution(
    reference: str,
    options: Mapping[str, Option],
    lengths: Sequence[int],
    progress: Callable[[str], None] = lambda what: None,
) -> LengthDistribution:
    """Peaks of all steps over these lengths, `batch_size` sequences a step. Raises InputError and as `simulate`."""
    if not lifecycle_of(options).is_training_alone:
        raise InputError("--seq-lens is about training steps: leave evaluation, generation, saving and loading out.")
    batch = options["batch_size"].value or 1
    groups = [lengths[start : start + batch] for start in range(0, len(lengths) - batch + 1, batch)]
    if not groups:
        raise InputError(f"The file has {len(lengths)} lengths, fewer than a batch of {batch}.")
    padded = [(batch, max(group)) for group in groups]
    packed = [(1, sum(group)) for group in groups]
    steps = Steps(reference, options, progress)
    steps.cover(padded)
    refused = None
    try:
        steps.cover(packed)
    except InputError as error:  # a row longer than the model's table of positions, say
        refused = str(error)
    tokens = sum(sum(group) for group in groups)
    return LengthDistribution(
        sequences=len(lengths),
        left_over=len(lengths) - len(groups) * batch,
        padding_percent=100 * (1 - tokens / sum(size[0] * size[1] for size in padded)),
        padded=_peaks("padded", padded, steps, options),
        packed=_peaks("packed", packed, steps, options) if refused is None else None,
        packed_refused=refused,
        traces=steps.traces,
        reasons=steps.reasons,
    )


def _peaks(name: str, sizes: Sequence[Size], steps: Steps, options: Mapping[str, Option]) -> Peaks:
    counts: dict[Size, int] = {}
    for size in sizes:
        counts[size] = counts.get(size, 0) + 1
    peaks = steps.peak_bytes(list(counts))
    order = sorted(counts, key=lambda size: (peaks[size], size))
    below = np.cumsum([counts[size] for size in order])
    at = {percent: order[int(np.searchsorted(below, percent / 100 * len(sizes)))] for percent in PERCENTILES}
    simulated = {size: steps.simulate(size) for size in dict.fromkeys(at.values())}
    return Peaks(
        name=name,
        counts=counts,
        peak_bytes=peaks,
        percentiles=[(percent, size, simulated[size]) for percent, size in at.items()],
        fitting=_fitting(order, below, steps) if gpu_of(options) is not None else None,
    )


def _fitting(order: Sequence[Size], below: np.ndarray, steps: Steps) -> int:
    """How many steps need no more than the GPU has, as expected; sizes are in the order of their peaks."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if steps.simulate(order[middle]).fit.headroom_bytes >= 0:
            low = middle + 1
        else:
            high = middle
    return int(below[low - 1]) if low else 0


def read_lengths(path: str) -> list[int]:
    """Lengths in tokens, one a line; empty lines do not count. Raises InputError with the line that is none."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Cannot read --seq-lens {path}: {error}.") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        if not line.isdigit() or int(line) < 1:
            raise InputError(f"--seq-lens {path}:{number}: {line[:40]!r} is no length in tokens.")
        found.append(int(line))
    if not found:
        raise InputError(f"--seq-lens {path} holds no length.")
    return found
