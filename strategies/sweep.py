"""Many estimates of one model: every combination of several values, and the largest value that fits.

What it changes: nothing; each point is simulated as it would be alone, those that are recorded alike share a trace
(shared_trace.py). Where each byte comes from: the simulations.
Not modelled: nothing beyond what the estimates leave out. The search for the largest value takes what fits to be
monotonic between the values that it simulates; the value that it returns and the next one are both simulated.
Sources: none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metapeak.strategies.processes import results
from metapeak.strategies.shared_trace import SharedTraces, trace_key
from metapeak.tracer.errors import InputError, MetapeakError
from metapeak.tracer.simulation import Option, Simulation, Verdict

SEARCHED = ("batch_size", "seq_len", "target_len", "image_size", "num_images", "lora_rank")
# No search goes further than this many times the last value that fitted.
_STRIDE = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """One combination: the values of the swept options, and its simulation or why there is none."""

    values: Mapping[str, Any]
    simulation: Simulation | None = None
    refused: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Sweep:
    """Every point, the last option varying fastest; how many steps were recorded for them."""

    swept: Mapping[str, tuple[Any, ...]]
    points: tuple[Point, ...]
    traces: int


def combinations(swept: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values, the last option varying fastest.

    >>> combinations({"seq_len": (1, 2), "method": ("full", "lora")})[1]
    {'seq_len': 1, 'method': 'lora'}
    """
    return [dict(zip(swept, values)) for values in itertools.product(*swept.values())]


def sweep(
    reference: str,
    swept: Mapping[str, Sequence[Any]],
    options_of_point: Callable[[Mapping[str, Any]], Mapping[str, Option]],
    *,
    jobs: int = 1,
    backend: str | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Sweep:
    """Simulate every combination of `swept`; `options_of_point` makes the resolved options of one.

    Points that share a trace are simulated by one of `jobs` processes, or of a cluster (`backend`, processes.py). A
    point that cannot be simulated is kept with its reason. Raises the last reason where none can be.
    """
    chosen = combinations(swept)
    found: list[Point | None] = [None] * len(chosen)
    resolved: dict[int, Mapping[str, Option]] = {}
    problem: MetapeakError | None = None
    for position, values in enumerate(chosen):
        try:
            resolved[position] = options_of_point(values)
        except MetapeakError as error:
            problem, found[position] = error, Point(values=values, refused=str(error))
    groups: dict[tuple, list[int]] = {}
    for position, options in resolved.items():
        groups.setdefault(trace_key(options), []).append(position)
    done = traces = 0
    if jobs == 1 and backend is None:
        calls = (
            (positions, _simulated(reference, [resolved[at] for at in positions])) for positions in groups.values()
        )
    else:
        asked = [(reference, [resolved[at] for at in positions]) for positions in groups.values()]
        calls = zip(groups.values(), results(_simulated, asked, jobs=jobs, backend=backend))
    for positions, (recorded, answers) in calls:
        traces += recorded
        for position, answer in zip(positions, answers):
            done += 1
            progress(f"{done} of {len(resolved)}: {' '.join(f'{name}={v}' for name, v in chosen[position].items())}")
            if isinstance(answer, MetapeakError):
                problem, found[position] = answer, Point(values=chosen[position], refused=str(answer))
            else:
                found[position] = Point(values=chosen[position], simulation=answer)
    if problem is not None and all(point.simulation is None for point in found):
        raise problem
    return Sweep(swept={name: tuple(values) for name, values in swept.items()}, points=tuple(found), traces=traces)


def _simulated(reference: str, points: Sequence[Mapping[str, Option]]) -> tuple[int, list[Simulation | MetapeakError]]:
    """(how many steps were recorded, what each point is or why it is not), of points that share a trace."""
    traces, answers = SharedTraces(reference), []
    for options in points:
        try:
            answers.append(traces.simulate(options).without_graph())
        except MetapeakError as error:
            answers.append(error)
    return traces.traces, answers


@dataclass(frozen=True, kw_only=True, eq=False)
class Largest:
    """The largest value that fits (0: none does), its simulation (of the smallest value where none fits), and the next
    value's simulation or why it cannot be. `tried` are all values that were simulated, with whether they fit.
    """

    option: str
    value: int
    simulation: Simulation
    beyond: Simulation | None
    refused: str | None
    tried: Mapping[int, bool]


def largest_that_fits(
    option: str,
    simulate_at: Callable[[int], Simulation],
    *,
    progress: Callable[[str], None] = lambda what: None,
) -> Largest:
    """The largest value of an option whose estimate fits its GPU, by search.

    `simulate_at` simulates one value. Raises what it raises for the value 1, InputError for an estimate without a GPU.
    """
    search = _Bracket(option, simulate_at, progress)
    if not search.fits(1):
        return search.result()
    while search.high is None or search.high - search.low > 1:
        search.fits(search.proposal())
    return search.result()


class _Bracket:
    """The largest value known to fit and the smallest known not to; proposals by secant and by halving."""

    def __init__(self, option, simulate_at, progress):
        self.option, self._simulate_at, self._progress = option, simulate_at, progress
        self.low, self.high = 0, None
        self._found: dict[int, Simulation] = {}
        self._refused: dict[int, str] = {}
        self._tried: dict[int, bool] = {}
        self._steps = self._stood_still = 0

    def fits(self, value: int) -> bool:
        self._progress(f"trying {self.option} {value}")
        try:
            simulation = self._simulate_at(value).without_graph()
        except InputError as error:
            if value == 1:
                raise
            self._refused[value], self._tried[value] = str(error), False
            self.high = value
            return False
        if simulation.fit is None:
            raise InputError(f"The largest {self.option} that fits needs --gpu or --gpu-memory to fit into.")
        self._found[value] = simulation
        fits = self._tried[value] = simulation.fit.verdict is Verdict.FITS
        if fits:
            self.low = value
        else:
            self.high = value
        for far in [one for one in self._found if one not in (1, self.low, self.high) and one < self.low]:
            del self._found[far]  # only the ends of the bracket are asked again
        return fits

    def proposal(self) -> int:
        """A value strictly between the ends (beyond the low one while there is no high one)."""
        room = self._found[self.low].fit.gpu.usable_bytes
        needs = {value: one.fit.device_range[1] for value, one in self._found.items()}
        if self.high is None:
            if self.low == 1:
                return 2
            slope = (needs[self.low] - needs[1]) / (self.low - 1)
            more = int((room - needs[self.low]) / slope) if slope > 0 else self.low
            if more == 0:
                # No room by the secant: the next value, and where that fits (needs that rise in steps), twice as much.
                self._stood_still += 1
                more = 1 if self._stood_still == 1 else self.low
            return min(self.low + more, self.low * _STRIDE)
        self._steps += 1
        middle = (self.low + self.high) // 2
        if self.high in self._refused or self._steps % 2 == 0:
            return middle
        slope = (needs[self.high] - needs[self.low]) / (self.high - self.low)
        guess = self.low + int((room - needs[self.low]) / slope) if slope > 0 else middle
        return max(self.low + 1, min(guess, self.high - 1))

    def result(self) -> Largest:
        return Largest(
            option=self.option,
            value=self.low,
            simulation=self._found[self.low or 1],
            beyond=self._found.get(self.high) if self.low else None,
            refused=self._refused.get(self.high),
            tried=dict(sorted(self._tried.items())),
        )
