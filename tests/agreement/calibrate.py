"""Measured over predicted, as the tables of this folder have it, for reports: `python -m` writes calibration.json.

For each metric the interval that holds 90 % of the rows that ran: the 5th and the 95th percentile. Rows beside
stand-ins are left out. With fewer rows than MIN_ROWS there is no 5th percentile to speak of, and the file says so.
The threshold is the smallest share of a GPU's capacity that was predicted for a case which ran out of memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import metapeak.reports
from tests.agreement import receipt_table, verdict_table

TARGET = Path(metapeak.reports.__file__).parent / "calibration.json"
COVERED = 0.9
MIN_ROWS = 20  # one row beyond each end of 90 %
# What a report calls its numbers -> the metrics of receipts that measured them.
METRICS = {
    "max_allocated": ("max_allocated", "max_active"),
    "steady": ("steady_allocated",),
    "reserved": ("max_reserved",),
    "device": ("nvml",),
}


def calibration() -> dict[str, Any]:
    """The contents of the file."""
    table, run = receipt_table.read_table(), receipt_table.read_run()
    ran = [receipt for receipt in receipt_table.read() if receipt.stand_in is None]
    ratios = {
        name: [
            1 / (1 + table[receipt.id].error_percent / 100)
            for receipt in ran
            if receipt.metric in metrics and table[receipt.id].error_percent is not None
        ]
        for name, metrics in METRICS.items()
    }
    return {
        "date": run["date"],
        "covered": COVERED,
        "metrics": {name: interval(values) for name, values in ratios.items()},
        "threshold": threshold(),
    }


def interval(ratios: Sequence[float]) -> dict[str, Any]:
    """Rows, and the interval (None with too few).

    >>> interval([1.0] * 18 + [0.5, 2.0])
    {'rows': 20, 'low': 1.0, 'high': 1.0}
    """
    ordered = sorted(ratios)
    if len(ordered) < MIN_ROWS:
        return {"rows": len(ordered), "low": None, "high": None}
    outside = int(len(ordered) * (1 - COVERED) / 2 + 1e-9)
    return {
        "rows": len(ordered),
        "low": round(ordered[outside], 6),
        "high": round(ordered[-1 - outside], 6),
    }


def threshold() -> dict[str, Any]:
    """The smallest predicted share of capacity among the cases that ran out of memory, and how many there are."""
    shares = [row.share for row in verdict_table.read_table().values() if row.happened == "oom" and row.share]
    return {"share": min(shares), "cases": len(shares)}


def text() -> str:
    return json.dumps(calibration(), indent=2) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
