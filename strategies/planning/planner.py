"""The plan: candidates in order of cost or time, those that fit simulated, best first, until enough are found.

What it changes: nothing; every row shown went through the same simulation as `metapeak estimate`.
Candidates whose model states and saved activations alone are too large are left out unsimulated: shares of one traced
step, a bound from below. So are those with more in every respect than one that did not fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from metapeak.strategies.cached import answer
from metapeak.strategies.planning.candidates import Candidate, Open, candidates
from metapeak.strategies.planning.offers import Offer, fabric_of, offers
from metapeak.strategies.planning.step_time import StepTime, Work, step_time, work_of
from metapeak.strategies.request import model_spec, model_strategies, step_spec
from metapeak.strategies.settings import options_of, resolve
from metapeak.tracer.disk_cache import DiskCache
from metapeak.tracer.errors import InputError, MetapeakError
from metapeak.tracer.gpus import Gpu, find_gpu
from metapeak.tracer.instances import Instance
from metapeak.tracer.simulation import Option, Simulation, Verdict

ORIGIN = "plan"
# A bound from below is believed with this much to spare: a sequence more is not quite a sequence's activations more.
_BOUND_SHARE = 0.9
ORDERS = ("cost", "time")


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """A candidate that fits: its simulation, its time and what it costs, cheapest instance first."""

    candidate: Candidate
    simulation: Simulation
    time: StepTime
    offers: Sequence[Offer]

    @property
    def tokens_a_second(self) -> tuple[float, float]:
        one = self.candidate
        tokens = one.batch_size * one.grad_accum * one.data_parallel * self.simulation.options["seq_len"].value
        return tokens / self.time.seconds[1], tokens / self.time.seconds[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What `plan` returns: the best that fit, best first, and what happened to the others, in counts.

    `work` is the traced work by method, `refused` the first candidate of each reason that could not be simulated.
    """

    found: Sequence[Planned]
    work: Mapping[str, Work]
    candidates: int
    ruled_out: int
    simulated: int
    left: int
    seconds: float
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
    cache: DiskCache | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Plan:
    """The best `top` ways to train `reference` on these GPUs: of each number of GPUs, method, degree of tensor
    parallelism and policy the best.

    `given` are options that stand, weakest first; `free` is what may be chosen. `headroom` is the share of the usable
    memory that has to stay free; `seconds` bounds the time for simulations. Raises InputError for a question without
    candidates, and what `simulate` raises when the model cannot be traced.
    """
    started = time.monotonic()
    options = resolve(*given)
    work = {method: _work(reference, given, method, progress) for method in free.methods}
    seq_len = _seq_len(options, reference, given, cache, progress)
    ids = [gpu.id for gpu in gpus]
    every = list(candidates(ids, free, seq_len=seq_len, tokens_per_batch=tokens_per_batch))
    if not every:
        raise InputError(_nothing(free, seq_len, tokens_per_batch))
    by_id = {gpu.id: gpu for gpu in gpus}
    fabrics = {gpu: fabric_of(instances, gpu) for gpu in ids}
    timed = []
    for one in every:
        estimate = step_time(work[one.method], one, by_id[one.gpu], seq_len, fabrics[one.gpu])
        if estimate is None:
            raise InputError(f"{one.gpu}: the catalogue lacks its FLOPs, bandwidth or link, so no time can be given.")
        timed.append((one, estimate))
    possible = [pair for pair in timed if _bound(work[pair[0].method], pair[0]) <= by_id[pair[0].gpu].usable_bytes]
    priced = {one: offers(instances, one, estimate, seq_len) for one, estimate in possible} if order == "cost" else {}
    possible.sort(key=lambda pair: _place(*pair, priced.get(pair[0]), order))

    found: list[Planned] = []
    failed: list[Candidate] = []
    refused: dict[str, Candidate] = {}
    simulated = left = 0
    for number, (one, estimate) in enumerate(possible):
        if len(found) == top:
            break
        if time.monotonic() - started > seconds:
            left = len(possible) - number
            break
        if any(_has_no_less(one, worse) for worse in (*failed, *refused.values())):
            continue
        if any(_is_like(one, better.candidate) for better in found):
            continue
        progress(f"simulating {one.gpus} x {one.gpu}, {one.layout}, micro-batch {one.batch_size}")
        simulated += 1
        try:
            simulation = answer(reference, resolve(*given, options_of(one.options, ORIGIN)), cache=cache)
        except MetapeakError as error:
            refused.setdefault(str(error), one)
            continue
        if not _fits(simulation, headroom):
            failed.append(one)
            continue
        best = priced.get(one) or offers(instances, one, estimate, seq_len)
        found.append(Planned(candidate=one, simulation=simulation, time=estimate, offers=best))
    return Plan(
        found=found,
        work=work,
        candidates=len(every),
        ruled_out=len(every) - len(possible),
        simulated=simulated,
        left=left,
        seconds=time.monotonic() - started,
        refused=refused,
    )


def _work(reference: str, given: Sequence[Mapping[str, Option]], method: str, progress) -> Work:
    """The traced work of one sequence with that method."""
    from dataclasses import replace

    from metapeak.strategies.prepared import plain_step_graph
    from metapeak.tracer.models import build, resolve_model

    progress(f"tracing one sequence, {method}")
    options = resolve(*given, options_of({"method": method, "batch_size": 1}, ORIGIN))
    spec = model_spec(reference, options)
    step = replace(step_spec(options), iterations=1, grad_accum=1)
    graph = plain_step_graph(spec, step, model_strategies(options))
    return work_of(graph, build(resolve_model(spec), dtype=spec.dtype).module.config)


def _seq_len(options: Mapping[str, Option], reference: str, given, cache, progress) -> int:
    """The length of a sequence: the given one, or what an estimate takes for this model."""
    if options["seq_len"].value is not None:
        return options["seq_len"].value
    progress("one sequence on one GPU")
    simulation = answer(reference, resolve(*given, options_of({"batch_size": 1}, ORIGIN)), cache=cache)
    length = simulation.options["seq_len"].value
    if length is None:
        raise InputError("plan counts tokens, and this model's batch has none.")
    return length


def _bound(work: Work, one: Candidate) -> float:
    """Bytes that a rank of the candidate has at least."""
    states = (work.parameter_bytes + work.state_bytes) / (one.dp_shard * one.tp)
    activations = work.saved_bytes if one.checkpointing == "none" else work.checkpointed_bytes
    return _BOUND_SHARE * (states + one.batch_size * activations / one.tp)


def _place(one: Candidate, estimate: StepTime, priced: Sequence[Offer] | None, order: str) -> tuple:
    """The order of candidates: by cost per token where a price is known, then by time per token; fewer parts first."""
    tokens = one.batch_size * one.grad_accum * one.data_parallel
    seconds = estimate.middle / tokens
    parts = (one.tp, one.dp_replicate, one.checkpointing != "none", one.grad_accum)
    if order == "time":
        return (seconds, one.gpus, *parts)
    cost = priced[0].on_demand if priced else None
    middle = (cost[0] * cost[1]) ** 0.5 if cost else None
    return (middle is None, middle if middle is not None else seconds * one.gpus, *parts)


def _has_no_less(one: Candidate, other: Candidate) -> bool:
    """Whether a rank of `one` holds at least what one of `other` does."""
    same = (one.gpu, one.method, one.tp, one.checkpointing) == (other.gpu, other.method, other.tp, other.checkpointing)
    return same and one.batch_size >= other.batch_size and one.dp_shard <= other.dp_shard


def _is_like(one: Candidate, other: Candidate) -> bool:
    """Whether the two differ in no more than how the batch is cut: the better of them is shown."""
    kind = ("gpu", "gpus", "method", "tp", "checkpointing")
    return all(getattr(one, name) == getattr(other, name) for name in kind)


def _fits(simulation: Simulation, headroom: float) -> bool:
    fit = simulation.fit
    return fit.verdict is Verdict.FITS and fit.headroom_bytes >= headroom * fit.gpu.usable_bytes


def _nothing(free: Open, seq_len: int, tokens: int | None) -> str:
    numbers = ", ".join(map(str, free.gpus))
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
