"""The peaks over a file of sequence lengths, as a table and as a record."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from metapeak.reports.data import SCHEMA_VERSION
from metapeak.reports.sizes import gib
from metapeak.strategies.lengths import LengthDistribution, Peaks


def lengths_record(found: LengthDistribution) -> dict[str, Any]:
    """Plain values; bytes are integers. `peak_bytes` are traced storages without workspaces."""
    return {
        "schema_version": SCHEMA_VERSION,
        "sequences": found.sequences,
        "left_over": found.left_over,
        "padding_percent": round(found.padding_percent, 3),
        "traces": found.traces,
        "ranges_cut": list(found.reasons),
        "padded": _record(found.padded),
        "packed": None if found.packed is None else _record(found.packed),
        "packed_refused": found.packed_refused,
    }


def _record(peaks: Peaks) -> dict[str, Any]:
    return {
        "steps": sum(peaks.counts.values()),
        "fitting": peaks.fitting,
        "percentiles": [
            {
                "percent": percent,
                "batch_size": size[0],
                "length": size[1],
                "requested_bytes": simulation.worst.requested_bytes,
                "allocated_bytes": simulation.worst.allocated_bytes,
                "reserved_bytes": simulation.worst.reserved_bytes,
                "device_bytes": simulation.worst.device_bytes,
                "verdict": simulation.fit.verdict.value if simulation.fit else None,
            }
            for percent, size, simulation in peaks.percentiles
        ],
        "sizes": [
            {"batch_size": size[0], "length": size[1], "steps": count, "peak_bytes": peaks.peak_bytes[size]}
            for size, count in sorted(peaks.counts.items())
        ],
    }


def print_lengths(found: LengthDistribution, model: str, console: Console) -> None:
    """Print a row a percentile for padded and packed batches."""
    steps = sum(found.padded.counts.values())
    console.print(
        Text(
            f"{model}: {found.sequences:,} sequences, {steps:,} steps, from {found.traces} traces; padding is "
            f"{found.padding_percent:.1f} % of padded batches"
        )
    )
    table = Table(box=None, pad_edge=False)
    for name in ("batches", "steps up to"):
        table.add_column(name)
    for name in ("batch x length", "live GiB", "allocated", "reserved", "device"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    both = [peaks for peaks in (found.padded, found.packed) if peaks is not None]
    for peaks in both:
        for percent, size, simulation in peaks.percentiles:
            rank = simulation.worst
            table.add_row(
                peaks.name,
                "the largest" if percent == 100 else f"{percent} %",
                f"{size[0]} x {size[1]}",
                *(gib(value) for value in (rank.requested_bytes, rank.allocated_bytes, rank.reserved_bytes)),
                gib(rank.device_bytes),
                simulation.fit.verdict.value.replace("-", " ") if simulation.fit else "",
            )
    console.print(table)
    for peaks in both:
        if peaks.fitting is not None:
            console.print(Text(f"{peaks.name}: {peaks.fitting:,} of {sum(peaks.counts.values()):,} steps fit."))
    if found.packed_refused:
        console.print(Text(f"Packed batches cannot be traced: {found.packed_refused}", style="yellow"))
    if found.left_over:
        console.print(Text(f"The last {found.left_over} sequences make no whole batch and are left out.", style="dim"))
    for reason in found.reasons:
        console.print(Text(f"Lengths were cut into ranges at {reason}", style="dim"))
    console.print(
        Text(
            "Assumed: batches in the order of the file; packed sequences lie end to end, attention as of one row; "
            "reserved and device bytes are of a process that sees this length alone: holes that other lengths leave "
            "in the allocator are not counted.",
            style="dim",
        )
    )
