"""Predictions beside published measurements: each receipt's options through `simulate`, and how far off it is.

Note [What counts as within]
    Half a unit of the source's last digit, and beside it: for byte-exact allocator counters 0.5 % (peak) and 0.1 %
    (steady), what the project's design asks for. Sources that print rounded values leave more than digits open: other
    versions, data of unlike length, whether GB is 1e9 or 2**30 (7 % apart, so a wrong guess is seen). 3 % is less than
    half of that; of 35 rounded allocator values 31 are within it, with a median of 0.05 % and none between 2.6 and
    17 %, so that it decides no row by a hair.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metapeak.reports.receipt_options import options_of_receipt, reference_of
from metapeak.reports.receipts import Receipt, Refused, before_first_step, first_batch_only
from metapeak.strategies.request import simulate_resolved, step_spec
from metapeak.strategies.settings import options_of, resolve
from metapeak.strategies.shared_trace import SharedTraces
from metapeak.tracer.errors import MetapeakError
from metapeak.tracer.liveness import Category, Phase
from metapeak.tracer.simulation import Option, RankResult, Simulation

# Beyond the source's own rounding: within for byte-exact sources (by metric), and for the others. See the note above.
EXACT_TOLERANCE_PERCENT = {"max_allocated": 0.5, "steady_allocated": 0.1}
ROUNDED_TOLERANCE_PERCENT = 3.0
PREDICTED_METRICS = ("max_allocated", "max_active", "steady_allocated", "max_reserved", "nvml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A receipt with what was predicted for it, or why nothing was."""

    receipt: Receipt
    predicted_bytes: int | None = None
    seconds: float = 0.0
    refused: str | None = None
    # (least, most) where fragmentation decides: see `range_of_metric`.
    predicted_range: tuple[int, int] | None = None

    @property
    def within_range(self) -> bool | None:
        """Whether the measured value lies in the predicted range, its rounding allowed for; None without a range."""
        if self.predicted_range is None:
            return None
        low, high = self.predicted_range
        rounding = self.receipt.rounding_bytes
        return low - rounding <= self.receipt.measured_bytes <= high + rounding

    @property
    def error_percent(self) -> float | None:
        """Signed; positive is too much."""
        if self.predicted_bytes is None:
            return None
        return 100 * (self.predicted_bytes - self.receipt.measured_bytes) / self.receipt.measured_bytes

    @property
    def tolerance_percent(self) -> float:
        """What counts as within: half a unit of the source's last digit, and a percentage beside it."""
        receipt = self.receipt
        exact = receipt.rounding_bytes == 0 and receipt.metric in EXACT_TOLERANCE_PERCENT
        allowed = EXACT_TOLERANCE_PERCENT[receipt.metric] if exact else ROUNDED_TOLERANCE_PERCENT
        return allowed + 100 * receipt.rounding_bytes / receipt.measured_bytes

    @property
    def within(self) -> bool | None:
        """Whether the error is one; None where nothing was predicted, and beside a stand-in."""
        if self.error_percent is None or self.receipt.stand_in is not None:
            return None
        return abs(self.error_percent) <= self.tolerance_percent


def predict(receipts: Sequence[Receipt], traces: dict[str, SharedTraces] | None = None) -> list[Prediction]:
    """Predictions for receipts that differ only in their metric: one simulation.

    `traces` by model: receipts that differ in liveness strategies alone (checkpointing, the allocator's settings) share
    the recorded step, when they are asked for one after another.
    """
    refusals = {receipt.id: _unpredicted(receipt.metric) for receipt in receipts if _unpredicted(receipt.metric)}
    wanted = [receipt for receipt in receipts if receipt.id not in refusals]
    started = time.perf_counter()
    simulation = None
    if wanted:
        try:
            simulation = _simulate(wanted[0], traces if traces is not None else {})
        except (Refused, MetapeakError) as error:
            refusals |= {receipt.id: str(error) for receipt in wanted}
    seconds = time.perf_counter() - started
    return [
        Prediction(receipt=receipt, refused=refusals[receipt.id])
        if receipt.id in refusals
        else _prediction(receipt, simulation.worst, seconds)
        for receipt in receipts
    ]


def _simulate(receipt: Receipt, traces: dict[str, SharedTraces]) -> Simulation:
    options = resolved_options(receipt)
    reference = reference_of(receipt)
    if first_batch_only(receipt):
        # Where ranks share gradients, the first of several micro-batches keeps them whole for the last one.
        step = dataclasses.replace(step_spec(options), iterations=1)
        if options["engine"].value != "none" and step.grad_accum > 1:
            return _first_batch(simulate_resolved(reference, options, step=step))
        return simulate_resolved(reference, options, step=dataclasses.replace(step, grad_accum=1))
    return traces.setdefault(reference, SharedTraces(reference)).simulate(options)


def _first_batch(simulation: Simulation) -> Simulation:
    """The step up to the end of its first backward."""
    ranks = []
    for rank in simulation.ranks:
        backward = np.flatnonzero(rank.liveness.op_phase == Phase.BACKWARD)
        gaps = np.flatnonzero(np.diff(backward) > 1)
        end = int(backward[gaps[0]] if len(gaps) else backward[-1]) + 1
        ranks.append(dataclasses.replace(rank, liveness=rank.liveness.until(end)))
    return dataclasses.replace(simulation, ranks=tuple(ranks))


def resolved_options(receipt: Receipt) -> dict[str, Option]:
    """Raises Refused and InputError."""
    return resolve(options_of(options_of_receipt(receipt), f"receipt {receipt.id}"))


def _unpredicted(metric: str) -> str | None:
    return (
        None if metric in PREDICTED_METRICS else f"metric {metric} is not predicted: the source does not say what it is"
    )


def _prediction(receipt: Receipt, rank: RankResult, seconds: float) -> Prediction:
    nbytes = loaded_bytes(rank) if before_first_step(receipt) else bytes_of_metric(receipt.metric, rank)
    span = range_of_metric(receipt.metric, rank)
    if receipt.metric == "nvml" and receipt.context_bytes is not None:
        # the source measured the context that is assumed otherwise
        low, high = rank.reservation.reserved_range
        nbytes, span = high + receipt.context_bytes, (low + receipt.context_bytes, high + receipt.context_bytes)
    if receipt.metric == "steady_allocated" and receipt.gradients_held:
        nbytes += _gradient_bytes(rank)
    return Prediction(receipt=receipt, predicted_bytes=nbytes, predicted_range=span, seconds=seconds)


def bytes_of_metric(metric: str, rank: RankResult) -> int:
    """What a prediction says about a counter of PREDICTED_METRICS."""
    if metric in ("max_allocated", "max_active"):
        return rank.allocated_bytes
    if metric == "steady_allocated":
        return rank.reservation.allocated_end  # with the workspaces that cuBLAS keeps
    if metric == "max_reserved":
        return rank.reserved_bytes
    return rank.device_bytes


def loaded_bytes(rank: RankResult) -> int:
    """Bytes of the model before its first step."""
    liveness = rank.liveness
    model = (liveness.category == Category.PARAMETER) | (liveness.category == Category.BUFFER)
    return int(liveness.nbytes[model].sum())


def _gradient_bytes(rank: RankResult) -> int:
    """Bytes of the gradients that the last step freed at its end."""
    liveness = rank.liveness
    at_the_end = (liveness.category == Category.GRADIENT) & (liveness.death >= liveness.num_ops)
    return int(liveness.nbytes[at_the_end].sum())


def range_of_metric(metric: str, rank: RankResult) -> tuple[int, int] | None:
    """(least, most) that a prediction allows for a counter which depends on fragmentation; None for the others.

    The device's range is that of reserved bytes with the context and libraries of `overheads`.
    """
    if metric == "max_reserved":
        return rank.reservation.reserved_range
    return rank.device_range if metric == "nvml" else None
