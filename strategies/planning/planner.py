"""The plan: candidates in order of cost or time, those that can fit simulated, best first, until enough are found.

What it changes: nothing; every row shown went through the same simulation as `metapeak estimate`.
Left out unsimulated, and counted by rule: layouts that `simulate` refuses or that waste their time (candidates.py),
those whose bound from below is over the GPU (profiles.py), those with more in every respect than one that did not fit,
and those like one that was found and is better.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field

from metapeak.strategies.cached import answer
from metapeak.strategies.planning.candidates import Candidate, Open, candidates
from metapeak.strategies.planning.offers import Offer, fabric_of, offers
from metapeak.strategies.planning.profiles import BATCHES, Profile, profile, record_step
from metapeak.strategies.planning.step_time import StepTime, Work, step_time
from metapeak.strategies.processes import workers
from metapeak.strategies.settings import options_of, resolve
from metapeak.tracer.disk_cache import DiskCache
from metapeak.tracer.errors import InputError, MetapeakError
from metapeak.tracer.gpus import Gpu, find_gpu
from metapeak.tracer.instances import Instance
from metapeak.tracer.simulation import Option, Simulation, Verdict

ORIGIN = "plan"
# Costs and times are ranges several times as wide as this ratio, so what differs by less counts as equal.
SAME = 1.1
# Engines whose ranks hold what profiles.py takes shares of; of others, and of offloading, no bound is known.
_BOUNDED_ENGINES = (None, "none", "ddp", "fsdp1", "fsdp2")
_UNBOUNDED = ("cpu_offload", "offload_optimizer", "offload_param")
STATES_RULE = "model states alone are larger than the GPU"
BOUND_RULE = "the least that a rank takes leaves less than the headroom"
WORSE_RULE = "no less in any respect than one that does not fit or is refused"
LIKE_RULE = "like a better one that is shown, but for how the batch is cut"


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """A candidate that fits: its simulation, its time and what it costs, cheapest instance first."""

    candidate: Candidate
    simulation: Simulation
    time: StepTime
    offers: Sequence[Offer]
    work: Work

    @property
    def tokens_a_second(self) -> tuple[float, float]:
        one = self.candidate
        tokens = one.batch_size * one.grad_accum * one.data_parallel * self.simulation.options["seq_len"].value
        return tokens / self.time.seconds[1], tokens / self.time.seconds[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What `plan` returns: the best that fit, best first, and what happened to the others, in counts.

    `candidates` were enumerated, of them `excluded` by each rule, `simulated` simulated, `left` not looked at when the
    best were found or time was up (`in_time` False). `refused`: the first candidate of each reason that could not be
    simulated. `traces` are the steps that the bounds are from, `exact` whether those were exact functions of the batch.
    """

    found: Sequence[Planned]
    candidates: int
    excluded: Mapping[str, int]
    simulated: int
    left: int
    seconds: float
    in_time: bool = True
    traces: int = 0
    exact: bool = True
    refused: Mapping[str, Candidate] = field(default_factory=dict)


def plan(
    reference: str,
    given: Sequence[Mapping[str, Option]],
    gpus: Sequence[Gpu],
    free: Open,
    *,
    instances: Sequence[Instance],
    tokens_per_batch: int | None = None,
    headroom: float = 0.05,
    order: str = "cost",
    top: int = 5,
    seconds: float = 120.0,
    jobs: int = 1,
    cache: DiskCache | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Plan:
    """The best `top` ways to train `reference` on these GPUs: of each number of GPUs, method, policy and degrees of
    tensor, pipeline, context and expert parallelism the best.

    `given` are options that stand, weakest first; `free` is what may be chosen. `headroom` is the share of the usable
    memory that has to stay free; `seconds` bounds the time for simulations, `jobs` processes run. Raises InputError for
    a question without candidates, and what `simulate` raises when the model cannot be traced.
    """
    started = time.monotonic()
    options = resolve(*given)
    with workers(jobs) as pool:
        progress("tracing steps of one GPU")
        profiles = _Profiles(pool, reference, given, free.policies, bool(options["loss_parallel"].value))
        first = profiles[free.methods[0], max(free.gpus) > 1].recorded
        seq_len = first.seq_len
        if seq_len is None:
            raise InputError("plan counts tokens, and this model's batch has none.")
        by_id = {gpu.id: gpu for gpu in gpus}
        excluded: Counter[str] = Counter()
        every = list(
            candidates(
                list(by_id), free, first.model, seq_len=seq_len, tokens_per_batch=tokens_per_batch, excluded=excluded
            )
        )
        enumerated = len(every) + excluded.total()
        if not every:
            raise InputError(_nothing(free, seq_len, tokens_per_batch, excluded))
        bounded = options["engine"].value in _BOUNDED_ENGINES and not any(options[name].value for name in _UNBOUNDED)
        possible = _possible(every, profiles, by_id, headroom, excluded) if bounded else every
        rows = _ordered(possible, profiles, by_id, instances, seq_len, order)
        search = _Search(rows, top, headroom)
        search.run(
            lambda one: pool.submit(_simulated, reference, resolve(*given, options_of(one.options, ORIGIN)), cache),
            jobs=max(jobs, 1),
            until=started + seconds,
            progress=progress,
        )
    for rule, count in search.skipped.items():
        excluded[rule] += count
    return Plan(
        found=[row.planned(simulation) for row, simulation in search.best()],
        candidates=enumerated,
        excluded=excluded,
        simulated=search.simulated,
        left=search.left,
        seconds=time.monotonic() - started,
        in_time=search.in_time,
        traces=len(BATCHES) * len(profiles),
        exact=all(one.exact for one in profiles.values()),
        refused=search.refused,
    )


class _Profiles(dict):
    """The bounds by (method, whether FSDP runs it), recorded when they are first asked for."""

    def __init__(self, pool, reference: str, given, policies: Sequence[str], logits_cut: bool):
        super().__init__()
        self._logits_cut = logits_cut
        self._record = lambda method, sharded: [
            pool.submit(_recorded, reference, given, method, policies, sharded, batch) for batch in BATCHES
        ]

    def __missing__(self, kind: tuple[str, bool]) -> Profile:
        self[kind] = profile(*(future.result() for future in self._record(*kind)), logits_cut=self._logits_cut)
        return self[kind]

    def known(self, method: str) -> Profile:
        """That of either kind: model states are the same."""
        return next((one for (of, _), one in self.items() if of == method), None) or self[method, True]


def _recorded(reference, given, method, policies, sharded, batch):
    return record_step(reference, given, method, policies, sharded=sharded, batch=batch)


def _simulated(reference: str, options: Mapping[str, Option], cache: DiskCache | None) -> Simulation | str:
    """The simulation without its graph, or why there is none; in a worker's process."""
    try:
        return answer(reference, options, cache=cache).without_graph()
    except MetapeakError as error:
        return str(error)


def _possible(
    every: Sequence[Candidate],
    profiles: _Profiles,
    gpus: Mapping[str, Gpu],
    headroom: float,
    excluded: Counter[str],
) -> list[Candidate]:
    """The candidates whose bounds leave them a chance."""
    found, known = [], {}
    for one in every:
        gpu = gpus[one.gpu]
        if profiles.known(one.method).state_bytes(one) > gpu.usable_bytes:
            excluded[STATES_RULE] += 1
            continue
        # The bound knows how many microbatches are in flight, not how many there are.
        key = (one.gpu, one.gpus, one.method, one.checkpointing, one.batch_size, one.tp, one.pp, one.cp, one.ep,
               one.dp_shard, one.is_sharded, min(one.pp, one.grad_accum))  # fmt: skip
        if key not in known:
            bounds = profiles[one.method, one.is_sharded]
            known[key] = bounds.least_bytes(one, gpu) > (1 - headroom) * gpu.usable_bytes
        if known[key]:
            excluded[BOUND_RULE] += 1
        else:
            found.append(one)
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class _Row:
    """A candidate that may fit, with its place in the order."""

    candidate: Candidate
    time: StepTime
    offers: Sequence[Offer]
    work: Work

    def planned(self, simulation: Simulation) -> Planned:
        return Planned(
            candidate=self.candidate, simulation=simulation, time=self.time, offers=self.offers, work=self.work
        )


def _ordered(possible, profiles, gpus: Mapping[str, Gpu], instances, seq_len: int, order: str) -> list[_Row]:
    """The candidates with times and offers, best first. Raises InputError for a GPU without a data sheet."""
    fabrics = {gpu: fabric_of(instances, gpu) for gpu in gpus}
    of_gpu = {gpu: [item for item in instances if item.gpu == gpu and item.whole] for gpu in gpus}
    rows = []
    for one in possible:
        work = profiles[one.method, one.is_sharded].recorded.work
        estimate = step_time(work, one, gpus[one.gpu], seq_len, fabrics[one.gpu])
        if estimate is None:
            raise InputError(f"{one.gpu}: the catalogue lacks its FLOPs, bandwidth or link, so no time can be given.")
        row = _Row(candidate=one, time=estimate, offers=offers(of_gpu[one.gpu], one, estimate, seq_len), work=work)
        rows.append((_place(one, estimate, row.offers, order), len(rows), row))
    return [row for *_, row in sorted(rows, key=lambda item: item[:2])]


class _Search:
    """Simulates rows in order, `jobs` at a time, until the best `top` that fit are known."""

    def __init__(self, rows: Sequence[_Row], top: int, headroom: float):
        self._rows, self._top, self._headroom = rows, top, headroom
        self._open = list(range(len(rows)))  # neither simulated nor skipped, in order
        self._failed: list[Candidate] = []
        self._fits: dict[int, Simulation] = {}
        self.refused: dict[str, Candidate] = {}
        self.skipped: Counter[str] = Counter()
        self.simulated = self.left = 0
        self.in_time = True

    def best(self) -> list[tuple[_Row, Simulation]]:
        return [(self._rows[place], self._fits[place]) for place in sorted(self._fits)[: self._top]]

    def run(self, submit, *, jobs: int, until: float, progress: Callable[[str], None]) -> None:
        running: dict = {}
        while True:
            self._skip()
            while len(running) < jobs and time.monotonic() < until:
                place = self._next([self._rows[at].candidate for at in running.values()])
                if place is None:
                    break
                one = self._rows[place].candidate
                progress(f"simulating {one.gpus} x {one.gpu}, {one.layout}, micro-batch {one.batch_size}")
                self._open.remove(place)
                self.simulated += 1
                running[submit(one)] = place
            if not running:
                break
            done, _ = wait(running, timeout=max(0.0, until - time.monotonic()), return_when=FIRST_COMPLETED)
            if not done:
                self.simulated -= len(running)
                self._open += running.values()
                break
            for future in done:
                self._judge(running.pop(future), future.result())
        self.left = len(self._open)
        self.in_time = self._next([]) is None

    def _next(self, running: Sequence[Candidate]) -> int | None:
        """The first row that is worth a simulation now: better than the worst that would be shown, and not to be
        decided by one that is running.
        """
        shown = sorted(self._fits)[: self._top]
        end = shown[-1] if len(shown) == self._top else len(self._rows)
        for place in self._open:
            if place >= end:
                return None
            one = self._rows[place].candidate
            if not any(_is_like(one, other) or _has_no_less(one, other) for other in running):
                return place
        return None

    def _judge(self, place: int, result: Simulation | str) -> None:
        one = self._rows[place].candidate
        if isinstance(result, str):
            self.refused.setdefault(result, one)
            self._failed.append(one)
        elif _fits(result, self._headroom):
            self._fits[place] = result
        else:
            self._failed.append(one)

    def _skip(self) -> None:
        """Let go of rows that need no simulation any more."""
        better = [(place, self._rows[place].candidate) for place in self._fits]
        still = []
        for place in self._open:
            one = self._rows[place].candidate
            if any(_has_no_less(one, other) for other in self._failed):
                self.skipped[WORSE_RULE] += 1
            elif any(at < place and _is_like(one, other) for at, other in better):
                self.skipped[LIKE_RULE] += 1
            else:
                still.append(place)
        self._open = still


def _place(one: Candidate, estimate: StepTime, priced: Sequence[Offer], order: str) -> tuple:
    """The order of candidates: by cost per token where a price is known, then by time per token; of those that count as
    equal the one with fewer parts, then the better one.
    """
    seconds = estimate.middle / (one.batch_size * one.grad_accum * one.data_parallel)
    parts = (one.tp * one.pp * one.cp * one.ep, one.checkpointing != "none", one.dp_replicate > 1 < one.dp_shard)
    cost = priced[0].on_demand if priced and order == "cost" else None
    value = (cost[0] * cost[1]) ** 0.5 if cost else seconds * (one.gpus if order == "cost" else 1)
    return (order == "cost" and cost is None, round(math.log(value, SAME)), *parts, value, one.gpus)


_KIND = ("gpu", "gpus", "method", "checkpointing", "tp", "pp", "cp", "ep")


def _has_no_less(one: Candidate, other: Candidate) -> bool:
    """Whether a rank of `one` holds at least what one of `other` does."""
    kind = ("gpu", "method", "tp", "pp", "cp", "ep", "checkpointing", "schedule", "is_sharded")
    return (
        one.batch_size >= other.batch_size
        and one.dp_shard <= other.dp_shard
        and (one.pp == 1 or one.grad_accum >= other.grad_accum)
        and all(getattr(one, name) == getattr(other, name) for name in kind)
    )


def _is_like(one: Candidate, other: Candidate) -> bool:
    """Whether the two differ in no more than how the batch is cut: the better of them is shown."""
    return all(getattr(one, name) == getattr(other, name) for name in _KIND)


def _fits(simulation: Simulation, headroom: float) -> bool:
    fit = simulation.fit
    return fit.verdict is Verdict.FITS and fit.headroom_bytes >= headroom * fit.gpu.usable_bytes


def _nothing(free: Open, seq_len: int, tokens: int | None, excluded: Mapping[str, int]) -> str:
    numbers = ", ".join(map(str, free.gpus))
    if excluded:
        return f"plan: no layout of {numbers} GPUs can be: " + "; ".join(
            f"{rule} ({n:,})" for rule, n in excluded.items()
        )
    if tokens is None:
        return f"plan: no layout of the given degrees multiplies to {numbers} GPUs."
    return (
        f"plan: {tokens} tokens a batch are no micro-batch x {seq_len} tokens x data-parallel ranks x accumulation for "
        f"any layout of {numbers} GPUs. Take a multiple of {seq_len}."
    )


def gpus_of(text: str) -> list[Gpu]:
    """The GPUs of names with commas between them. Raises UnknownName."""
    found = {gpu.id: gpu for gpu in (find_gpu(name.strip()) for name in text.split(",") if name.strip())}
    return list(found.values())
