"""`metapeak diff`: a recorded step beside the predicted one, as a JSON-able record and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from metapeak.reports.data import model_record, options_record
from metapeak.reports.sizes import gib, size
from metapeak.reports.summary import print_head
from metapeak.tracer.device.comparison import Comparison, Group
from metapeak.tracer.liveness import Instant
from metapeak.tracer.simulation import RankResult, Simulation

SCHEMA_VERSION = 1
SHOWN = 12
# Below this share of matched bytes the recording is of something else.
MOSTLY = 0.5


def diff_record(path: str, comparison: Comparison, simulation: Simulation) -> dict[str, Any]:
    """The comparison as plain values; bytes are integers."""
    return {
        "schema_version": SCHEMA_VERSION,
        "snapshot": {
            "file": path,
            "device": comparison.device,
            "has_frames": comparison.has_frames,
            "before_bytes": comparison.before_bytes,
        },
        "model": model_record(simulation),
        "options": options_record(simulation),
        "recorded": dataclasses.asdict(comparison.recorded),
        "predicted": {**dataclasses.asdict(comparison.predicted), "repeats": comparison.repeats},
        "lines": {"compared": comparison.lines, "same": comparison.same_line},
        "mostly_matched": mostly_matched(comparison),
        "peak": {
            "recorded_bytes": comparison.recorded_peak_bytes,
            "predicted_bytes": comparison.predicted_peak_bytes,
            "in_order_bytes": comparison.in_order_bytes,
            "by_size_bytes": comparison.by_size_bytes,
            "missed_bytes": comparison.missed_bytes,
            "extra_bytes": comparison.extra_bytes,
            "recorded_at": _instant(comparison.recorded_peak_at),
            "predicted_at": _instant(comparison.predicted_peak_at),
        },
        "missed": [_group(group) for group in comparison.missed],
        "extra": [{**_group(group), "category": group.category} for group in comparison.extra],
        "modules": [
            {**dataclasses.asdict(share), "only_predicted_bytes": share.only_predicted_bytes}
            for share in comparison.modules
        ],
    }


def mostly_matched(comparison: Comparison) -> bool:
    """Whether most bytes that the recording asked for are in the prediction, at the same place in the order."""
    recorded = comparison.recorded
    return recorded.matched_bytes >= MOSTLY * recorded.nbytes


def _instant(instant: Instant | None) -> dict[str, Any] | None:
    if instant is None:
        return None
    return {name: getattr(instant, name) for name in ("iteration", "phase", "op", "module")}


def _group(group: Group) -> dict[str, Any]:
    record = dataclasses.asdict(group)
    record["bytes"] = record.pop("nbytes")
    del record["category"]
    return record


def print_diff(path: str, comparison: Comparison, simulation: Simulation, rank: RankResult, console: Console) -> None:
    """Print the comparison."""
    print_head(simulation, rank, console)
    console.print(Text(f"beside device {comparison.device} of {path}"))
    _peaks(comparison, console)
    _requests(comparison, console)
    _groups("Missed: in the recorded peak, not in the predicted one", "after", comparison.missed, console)
    _groups("Extra: in the predicted peak, not in the recorded one", "module", comparison.extra, console)
    _modules(comparison, console)


def _peaks(comparison: Comparison, console: Console) -> None:
    recorded, predicted = comparison.recorded_peak_bytes, comparison.predicted_peak_bytes
    percent = f", {100 * (predicted - recorded) / recorded:+.2f} %" if recorded else ""
    console.print(
        Text.assemble(
            ("Peak", "bold"),
            f" recorded {gib(recorded)} GiB, predicted {gib(predicted)} GiB "
            f"({gib(predicted - recorded, signed=True)}{percent}; requested bytes)",
        )
    )
    console.print(Text(f"  recorded in about {_where(comparison.recorded_peak_at)}"))
    console.print(Text(f"  predicted in {_where(comparison.predicted_peak_at)}"))
    console.print(
        Text(
            f"  in both {gib(comparison.in_order_bytes)}, by their size {gib(comparison.by_size_bytes)}, "
            f"missed {gib(comparison.missed_bytes)}, extra {gib(comparison.extra_bytes)}"
        )
    )


def _where(instant: Instant | None) -> str:
    if instant is None:
        return "a place before the first matched request"
    module = f" in {instant.module}" if instant.module else ""
    return f"iteration {instant.iteration}, {instant.phase}, {instant.op}{module}"


def _requests(comparison: Comparison, console: Console) -> None:
    recorded, predicted = comparison.recorded, comparison.predicted
    console.print(
        Text.assemble(
            ("Requests", "bold"),
            f" matched in order: {recorded.matched:,} of {recorded.count:,} recorded "
            f"({_percent(recorded.matched_bytes, recorded.nbytes)} of their bytes), "
            f"{predicted.matched:,} of {predicted.count:,} predicted "
            f"({_percent(predicted.matched_bytes, predicted.nbytes)})",
        )
    )
    if comparison.lines:
        console.print(Text(f"  of {comparison.lines:,} with a source line, {comparison.same_line:,} on the same line"))
    elif not comparison.has_frames:
        console.print(Text("  the recording has no stack frames: matched by order and size only"))
    if comparison.before_bytes:
        console.print(Text(f"  {gib(comparison.before_bytes)} GiB were there before the recording began: by size only"))
    if not mostly_matched(comparison):
        share = _percent(recorded.matched_bytes, recorded.nbytes)
        console.print(
            Text(
                f"Only {share} of the recorded bytes are in this prediction: the recording is of another model, batch, "
                "precision or code. Small equal sizes match by chance; the tables below say little.",
                style="bold yellow",
            )
        )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"


def _groups(title: str, module_title: str, groups: Sequence[Group], console: Console) -> None:
    console.print()
    if not groups:
        console.print(Text(f"{title}: nothing"))
        return
    console.print(Text(title, style="italic"))
    table = Table(box=None, pad_edge=False)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("tensors", justify="right", no_wrap=True)
    table.add_column("made in", overflow="fold")
    table.add_column(module_title, overflow="fold")
    for group in groups[:SHOWN]:
        kind = f"{group.category.replace('_', ' ')}: " if group.category else ""
        table.add_row(size(group.nbytes), f"{group.count:,}", kind + group.where, group.module)
    if len(groups) > SHOWN:
        rest = groups[SHOWN:]
        table.add_row(
            size(sum(group.nbytes for group in rest)), f"{sum(group.count for group in rest):,}", "others", ""
        )
    console.print(table)


def _modules(comparison: Comparison, console: Console) -> None:
    table = Table(title="By module at the predicted peak, GiB", title_justify="left", box=None, pad_edge=False)
    table.add_column("module", overflow="fold")
    for name in ("predicted", "in both", "by size", "extra"):
        table.add_column(name, justify="right", no_wrap=True)
    shares = sorted(comparison.modules, key=lambda share: -share.predicted_bytes)
    for share in shares[:SHOWN]:
        numbers = (share.predicted_bytes, share.in_order_bytes, share.by_size_bytes, share.only_predicted_bytes)
        table.add_row(share.module or "(the model itself)", *map(gib, numbers))
    if len(shares) > SHOWN:
        rest_bytes = sum(share.predicted_bytes for share in shares[SHOWN:])
        table.add_row(f"{len(shares) - SHOWN} more", gib(rest_bytes))
    console.print()
    console.print(table)
