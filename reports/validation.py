"""Predictions beside published measurements: each receipt's options through `simulate`, and how far off it is."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from metapeak.reports.receipts import (
    Receipt,
    Refused,
    before_first_step,
    first_batch_only,
    options_of_receipt,
    reference_of,
)
from metapeak.reports.sizes import gib
from metapeak.strategies.request import simulate_resolved, step_spec
from metapeak.strategies.settings import options_of, resolve
from metapeak.tracer.errors import MetapeakError
from metapeak.tracer.liveness import Category
from metapeak.tracer.simulation import RankResult

# Beyond the source's own rounding: within for byte-exact sources (by metric), and for the others.
EXACT_TOLERANCE_PERCENT = {"max_allocated": 0.5, "steady_allocated": 0.1}
ROUNDED_TOLERANCE_PERCENT = 3.0


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
        return None if self.error_percent is None else abs(self.error_percent) <= self.tolerance_percent


def validate(receipts: Sequence[Receipt], progress: Callable[[str], None] = lambda what: None) -> list[Prediction]:
    """Every receipt predicted or refused, in order. Receipts of one step (its peak, its steady bytes) share a trace."""
    results: dict[str, Prediction] = {}
    for group in _same_step(receipts):
        progress(f"{group[0].id} ({len(results)} of {len(receipts)})")
        results |= {prediction.receipt.id: prediction for prediction in predict(group)}
    return [results[receipt.id] for receipt in receipts]


def _same_step(receipts: Iterable[Receipt]) -> Iterable[list[Receipt]]:
    groups: dict[str, list[Receipt]] = {}
    for receipt in receipts:
        key = json.dumps([receipt.model, receipt.definition, receipt.gpu, receipt.options], sort_keys=True)
        groups.setdefault(key, []).append(receipt)
    return groups.values()


def predict(receipts: Sequence[Receipt]) -> list[Prediction]:
    """Predictions for receipts that differ only in their metric: one simulation."""
    first, started = receipts[0], time.perf_counter()
    try:
        options = resolve(options_of(options_of_receipt(first), f"receipt {first.id}"))
        step = step_spec(options)
        if first_batch_only(first):
            step = dataclasses.replace(step, iterations=1, grad_accum=1)
        simulation = simulate_resolved(reference_of(first), options, step=step)
    except (Refused, MetapeakError) as error:
        return [Prediction(receipt=receipt, refused=str(error)) for receipt in receipts]
    seconds = time.perf_counter() - started
    return [_prediction(receipt, simulation.worst, seconds) for receipt in receipts]


def _prediction(receipt: Receipt, rank: RankResult, seconds: float) -> Prediction:
    nbytes = loaded_bytes(rank) if before_first_step(receipt) else bytes_of_metric(receipt.metric, rank)
    span = range_of_metric(receipt.metric, rank)
    if receipt.metric == "nvml" and receipt.context_bytes is not None:
        # the source measured the context that is assumed otherwise
        low, high = rank.reservation.reserved_range
        nbytes, span = high + receipt.context_bytes, (low + receipt.context_bytes, high + receipt.context_bytes)
    if receipt.metric == "steady_allocated" and receipt.gradients_held:
        nbytes += _gradient_bytes(rank)
    if nbytes is None:
        return Prediction(receipt=receipt, refused=f"metric {receipt.metric} is not predicted", seconds=seconds)
    return Prediction(receipt=receipt, predicted_bytes=nbytes, predicted_range=span, seconds=seconds)


def bytes_of_metric(metric: str, rank: RankResult) -> int | None:
    """What a prediction says about a counter; None for those that it says nothing about."""
    if metric in ("max_allocated", "max_active"):
        return rank.allocated_bytes
    if metric == "steady_allocated":
        return rank.reservation.allocated_end  # with the workspaces that cuBLAS keeps
    if metric == "max_reserved":
        return rank.reserved_bytes
    if metric == "nvml":
        return rank.device_bytes
    return None


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


# -- the record and the table ------------------------------------------------------------------------------------------


def validation_record(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The JSON-able record of the contract."""
    return {
        "receipts": [
            {
                "id": prediction.receipt.id,
                "metric": prediction.receipt.metric,
                "predicted_bytes": prediction.predicted_bytes,
                "measured_bytes": prediction.receipt.measured_bytes,
                "rounding_bytes": prediction.receipt.rounding_bytes,
                "error_percent": prediction.error_percent,
                "within": prediction.within,
                "predicted_range": prediction.predicted_range,
                "within_range": prediction.within_range,
                "seconds": round(prediction.seconds, 3),
                "refused": prediction.refused,
            }
            for prediction in predictions
        ],
        "summary": summary_of(predictions),
    }


def summary_of(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Counts and errors over the receipts that ran, and the same by mechanism."""
    return {
        **_errors(predictions),
        "refused": sum(prediction.refused is not None for prediction in predictions),
        "worst": [
            {"id": prediction.receipt.id, "error_percent": prediction.error_percent}
            for prediction in sorted(
                (prediction for prediction in predictions if prediction.error_percent is not None),
                key=lambda prediction: -abs(prediction.error_percent),
            )[:10]
        ],
        "by_mechanism": {
            mechanism: _errors([one for one in predictions if mechanism in one.receipt.mechanisms])
            for mechanism in sorted({name for one in predictions for name in one.receipt.mechanisms})
        },
    }


def _errors(predictions: Sequence[Prediction]) -> dict[str, Any]:
    errors = sorted(abs(one.error_percent) for one in predictions if one.error_percent is not None)
    return {
        "count": len(errors),
        "within": sum(one.within is True for one in predictions),
        "ranges": sum(one.within_range is not None for one in predictions),
        "within_range": sum(one.within_range is True for one in predictions),
        "median_abs_error_percent": statistics.median(errors) if errors else None,
        "p95_abs_error_percent": errors[min(len(errors) - 1, int(0.95 * len(errors)))] if errors else None,
    }


def print_validation(predictions: Sequence[Prediction], console: Console) -> None:
    """Print a row a receipt, the refused ones with their reasons, and a line a mechanism."""
    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("receipt", "left"),
        ("metric", "left"),
        ("predicted GiB", "right"),
        ("measured GiB", "right"),
    ):
        table.add_column(name, justify=justify, overflow="fold")
    table.add_column("error %", justify="right", no_wrap=True)
    table.add_column("within", no_wrap=True)
    refused: dict[str, list[str]] = {}
    for one in predictions:
        if one.refused is not None:
            refused.setdefault(one.refused, []).append(one.receipt.id)
            continue
        style = "" if one.within else "yellow"
        table.add_row(
            one.receipt.id, one.receipt.metric, gib(one.predicted_bytes), gib(one.receipt.measured_bytes),
            f"{one.error_percent:+.3f}", _verdict(one), style=style,
        )  # fmt: skip
    console.print(table)
    for reason, ids in refused.items():
        console.print(Text(f"Refused, {len(ids)}: {reason} ({', '.join(ids)})", style="dim"))
    _print_summary(summary_of(predictions), console)


def _verdict(one: Prediction) -> str:
    """Within or not, and what that allows: a percentage, or the range in which fragmentation decides."""
    text = f"{'yes' if one.within else 'no'} ({one.tolerance_percent:.2f})"
    if one.predicted_range is None:
        return text
    low, high = one.predicted_range
    return f"{text}, {'in' if one.within_range else 'not in'} {gib(low)}..{gib(high)}"


def _print_summary(summary: Mapping[str, Any], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("mechanism", "receipts", "within", "median |error| %", "95th percentile"):
        table.add_column(name, justify="left" if name == "mechanism" else "right")
    rows = {**summary["by_mechanism"], "all": summary}
    for mechanism, errors in rows.items():
        if errors["count"]:
            table.add_row(
                mechanism, str(errors["count"]), str(errors["within"]), f"{errors['median_abs_error_percent']:.3f}",
                f"{errors['p95_abs_error_percent']:.3f}",
            )  # fmt: skip
    console.print()
    console.print(table)
