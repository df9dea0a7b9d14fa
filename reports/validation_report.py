"""What a validation found, for people and for programs: the record, the tables on a terminal, the page.

Errors against stand-ins (receipts.py, `Receipt.stand_in`) are shown and counted on their own, never among the others.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata, resources
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from metapeak.reports.receipts import Receipt
from metapeak.reports.sizes import gib, size
from metapeak.reports.validation import Prediction

WORST_SHOWN = 10
# What the receipts are grouped by in summaries: a receipt can be in several groups of one kind.
GROUPS: Mapping[str, Callable[[Receipt], Sequence[str]]] = {
    "mechanism": lambda receipt: receipt.mechanisms,
    "source": lambda receipt: (receipt.source_name,),
    "definition": lambda receipt: (receipt.definition,),
}


def validation_record(predictions: Sequence[Prediction], *, interrupted: bool = False) -> dict[str, Any]:
    """The JSON-able record of the contract."""
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {name: _version(name) for name in ("metapeak", "torch", "transformers", "peft")},
        "interrupted": interrupted,
        "receipts": [_row(prediction) for prediction in predictions],
        "summary": summary_of(predictions),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _row(one: Prediction) -> dict[str, Any]:
    return {
        "id": one.receipt.id,
        "metric": one.receipt.metric,
        "source": one.receipt.source_name,
        "definition": one.receipt.definition,
        "mechanisms": list(one.receipt.mechanisms),
        "predicted_bytes": one.predicted_bytes,
        "measured_bytes": one.receipt.measured_bytes,
        "rounding_bytes": one.receipt.rounding_bytes,
        "error_percent": one.error_percent,
        "within": one.within,
        "tolerance_percent": one.tolerance_percent,
        "predicted_range": one.predicted_range,
        "within_range": one.within_range,
        "stand_in": one.receipt.stand_in,
        "seconds": round(one.seconds, 3),
        "refused": one.refused,
    }


def summary_of(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Counts and errors over the receipts that ran, and the same by mechanism, source and definition."""
    judged = [one for one in predictions if one.receipt.stand_in is None]
    ran = sorted((one for one in judged if one.error_percent is not None), key=lambda one: -abs(one.error_percent))
    return {
        **errors_of(judged),
        "refused": sum(one.refused is not None for one in predictions),
        "beside_stand_in": errors_of([one for one in predictions if one.receipt.stand_in is not None]),
        "worst": [{"id": one.receipt.id, "error_percent": one.error_percent} for one in ran[:WORST_SHOWN]],
        **{f"by_{kind}": _by(judged, names_of) for kind, names_of in GROUPS.items()},
    }


def _by(predictions: Sequence[Prediction], names_of: Callable[[Receipt], Sequence[str]]) -> dict[str, Any]:
    names = sorted({name for one in predictions for name in names_of(one.receipt)})
    return {name: errors_of([one for one in predictions if name in names_of(one.receipt)]) for name in names}


def errors_of(predictions: Iterable[Prediction]) -> dict[str, Any]:
    """How many ran, how many are within, and the median and 95th percentile of |error|."""
    predictions = list(predictions)
    errors = [abs(one.error_percent) for one in predictions if one.error_percent is not None]
    return {
        "count": len(errors),
        "within": sum(one.within is True for one in predictions),
        "ranges": sum(one.within_range is not None for one in predictions),
        "within_range": sum(one.within_range is True for one in predictions),
        "median_abs_error_percent": statistics.median(errors) if errors else None,
        "p95_abs_error_percent": percentile_95(errors),
    }


def percentile_95(values: Sequence[float]) -> float | None:
    """The smallest value that at least 95 % of the values do not exceed; None of no values.

    >>> percentile_95(range(1, 101)), percentile_95([7]), percentile_95([])
    (95, 7, None)
    """
    ordered = sorted(values)
    return ordered[-(-95 * len(ordered) // 100) - 1] if ordered else None


# -- the terminal ------------------------------------------------------------------------------------------------------


def print_validation(predictions: Sequence[Prediction], console: Console, *, interrupted: bool = False) -> None:
    """Print the rows by mechanism and source, the refused ones with their reasons, and a line a group."""
    for (mechanisms, source), rows in _blocks(predictions).items():
        console.print(Text.assemble((mechanisms, "bold"), f"   {source}"))
        console.print(_table_of(rows))
        console.print()
    for title, rows in _refused(predictions).items():
        console.print(Text(f"Refused, {len(rows)}: {title} ({', '.join(rows)})", style="dim"))
    summary = summary_of(predictions)
    for kind in GROUPS:
        _print_summary(kind, summary[f"by_{kind}"] | {"all": summary}, console)
    beside = summary["beside_stand_in"]
    if beside["count"]:
        median = beside["median_abs_error_percent"]
        console.print(f"\nBeside a stand-in, not judged: {beside['count']} receipts, median |error| {median:.2f} %.")
    if interrupted:
        console.print("\nInterrupted: what was done is kept; the same command goes on from here.", style="bold yellow")


def _blocks(predictions: Sequence[Prediction]) -> dict[tuple[str, str], list[Prediction]]:
    """Receipts that ran, by all their mechanisms and their source, in the order of their first receipts."""
    blocks: dict[tuple[str, str], list[Prediction]] = {}
    for one in predictions:
        if one.refused is None:
            key = (", ".join(one.receipt.mechanisms) or "(no mechanism named)", one.receipt.source_name)
            blocks.setdefault(key, []).append(one)
    return blocks


def _refused(predictions: Sequence[Prediction]) -> dict[str, list[str]]:
    refused: dict[str, list[str]] = {}
    for one in predictions:
        if one.refused is not None:
            refused.setdefault(one.refused, []).append(one.receipt.id)
    return refused


def _table_of(rows: Sequence[Prediction]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("receipt", overflow="fold")
    table.add_column("metric", no_wrap=True)
    for name in ("predicted GiB", "measured GiB", "error %"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("rounded to", justify="right", no_wrap=True)
    table.add_column("within", overflow="fold")
    for one in rows:
        table.add_row(
            one.receipt.id, one.receipt.metric, gib(one.predicted_bytes), gib(one.receipt.measured_bytes),
            f"{one.error_percent:+.3f}", rounding(one), verdict(one), style="yellow" if one.within is False else "",
        )  # fmt: skip
    return table


def rounding(one: Prediction) -> str:
    """How exact the source is: the byte, or plus and minus half a unit of its last digit."""
    return "the byte" if one.receipt.rounding_bytes == 0 else f"± {size(one.receipt.rounding_bytes)}"


def verdict(one: Prediction) -> str:
    """Within or not, and what that allows: a percentage, or the range in which fragmentation decides."""
    if one.receipt.stand_in is not None:
        return f"not judged: {one.receipt.stand_in}"
    text = f"{'yes' if one.within else 'no'} ({one.tolerance_percent:.2f} %)"
    if one.predicted_range is None:
        return text
    low, high = one.predicted_range
    return f"{text}, {'in' if one.within_range else 'not in'} {gib(low)}..{gib(high)}"


def _print_summary(kind: str, rows: Mapping[str, Any], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in (kind, "receipts", "within", "median |error| %", "95th percentile"):
        table.add_column(name, justify="left" if name == kind else "right")
    for name, errors in rows.items():
        if errors["count"]:
            table.add_row(
                name, str(errors["count"]), str(errors["within"]), f"{errors['median_abs_error_percent']:.3f}",
                f"{errors['p95_abs_error_percent']:.3f}",
            )  # fmt: skip
    console.print()
    console.print(table)


# -- the page ----------------------------------------------------------------------------------------------------------


def render_validation_html(predictions: Sequence[Prediction], *, interrupted: bool = False) -> str:
    """One page that needs no network and no JavaScript: summaries, rows by mechanism and source, refusals."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(gib=gib, rounding=rounding, verdict=verdict)
    record = validation_record(predictions, interrupted=interrupted)
    return environment.from_string(_resource("validation.html")).render(
        record=record,
        summary=record["summary"],
        kinds=list(GROUPS),
        blocks=_blocks(predictions),
        refused=_refused(predictions),
        style=Markup(_resource("report.css")),
    )


def _resource(name: str) -> str:
    return (resources.files("metapeak.reports") / "html" / name).read_text(encoding="utf-8")
