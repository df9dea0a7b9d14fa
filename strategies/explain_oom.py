"""An out-of-memory message explained: which tensor of the simulated step it can be about, and how far there was to go.

What it changes: nothing; the step is simulated as asked and its storages are compared with the message.
Where each byte comes from: the trace, and the caching allocator's rounding (tracer/device/oom_candidates.py).
Not modelled: other processes on the GPU beyond what the message says of free memory; memory that the program held
before the step (a second model, an evaluation).
Sources: as of tracer/device/oom_message.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from metapeak.tracer.device.oom_candidates import Candidate, exact_candidates, scaled_candidates
from metapeak.tracer.device.oom_message import OomMessage
from metapeak.tracer.device.reserve import AllocatorResult, reserve
from metapeak.tracer.simulation import RankResult, Simulation


@dataclass(frozen=True, kw_only=True, eq=False)
class Explanation:
    """What is known of a failed request.

    `candidates` have the size of the message, likeliest first; without any, `other_lengths` are those that have it at
    another number of tokens. `capacity_bytes` is what torch's segments may have had on that GPU, from
    `capacity_from`; `predicted` is how the simulated step runs through the allocator with it (None: no capacity known).
    """

    message: OomMessage
    simulation: Simulation
    candidates: tuple[Candidate, ...]
    other_lengths: tuple[Candidate, ...]
    capacity_bytes: int | None
    capacity_from: str
    predicted: AllocatorResult | None

    @property
    def rank(self) -> RankResult:
        return self.simulation.worst

    @property
    def missing_bytes(self) -> int | None:
        """What the step's reserved peak needs beyond the capacity; negative: it would have fitted."""
        return None if self.capacity_bytes is None else self.rank.reserved_bytes - self.capacity_bytes

    def still_to_come(self, candidate: Candidate) -> int:
        """Bytes that allocated memory still rises after this candidate's request, until the step's peak."""
        return self.rank.allocated_bytes - candidate.allocated_before - candidate.tensor.nbytes


def explain_oom(message: OomMessage, simulation: Simulation) -> Explanation:
    """The tensors of `simulation` that `message` can be about, and how far its step had to go."""
    rank = simulation.worst
    capacity, origin = _capacity(message, simulation)
    predicted = reserve(rank.liveness, rank.allocator, capacity=capacity) if capacity else None
    candidates = exact_candidates(rank.liveness, message, rank.reservation, predicted)
    others = () if candidates else scaled_candidates(rank.liveness, message, rank.reservation, _lengths(simulation))
    return Explanation(
        message=message,
        simulation=simulation,
        candidates=tuple(candidates),
        other_lengths=tuple(others),
        capacity_bytes=capacity,
        capacity_from=origin,
        predicted=predicted,
    )


def _capacity(message: OomMessage, simulation: Simulation) -> tuple[int | None, str]:
    """(bytes for torch's segments, where the number is from)."""
    if message.capacity_bytes is not None:
        return message.capacity_bytes, "the message: reserved and free"
    overheads = simulation.worst.overheads
    if message.total is not None:
        return message.total.middle - overheads.expected_bytes, "the message's total less context and libraries"
    if simulation.fit is not None:
        return simulation.fit.gpu.usable_bytes - overheads.expected_bytes, "the GPU named, less context and libraries"
    return None, "unknown: neither the message nor --gpu says"


def _lengths(simulation: Simulation) -> tuple[int, ...]:
    """Numbers of tokens that stand for the batch in a shape."""
    options = simulation.options
    seq_len = options["seq_len"].value if "seq_len" in options else None
    batch = options["batch_size"].value if "batch_size" in options else None
    return tuple({(batch or 1) * seq_len: None, seq_len: None}) if seq_len else ()
