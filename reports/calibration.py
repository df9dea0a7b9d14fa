"""How far measurements lay from predictions like these: low, expected and high of each metric, from calibration.json.

That file is made from the tables of published measurements (tests/agreement/calibrate.py): for each metric the interval
of measured / predicted that held 90 % of the rows. It says nothing about a single model; a metric with too few rows has
no interval, and the report says so.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from metapeak.reports.sizes import gib
from metapeak.tracer.simulation import Fit, RankResult

# What the lines of the report are called -> the names in calibration.json.
LABELS = {"max_allocated": "allocated", "steady": "steady", "reserved": "reserved", "device": "device"}


@functools.cache
def calibration() -> Mapping[str, Any]:
    """The file's contents: date, share that an interval covers, intervals by metric, threshold."""
    return json.loads((resources.files("metapeak.reports") / "calibration.json").read_text(encoding="utf-8"))


def calibrated(rank: RankResult) -> dict[str, dict[str, Any]]:
    """By metric: `expected` bytes, `low` and `high` (None with too few rows), and the `rows` behind them."""
    expected = {
        "max_allocated": rank.allocated_bytes,
        "steady": rank.reservation.allocated_end,
        "reserved": rank.reserved_bytes,
        "device": rank.device_bytes,
    }
    return {
        name: {
            "low": _scaled(nbytes, interval["low"]),
            "expected": nbytes,
            "high": _scaled(nbytes, interval["high"]),
            "rows": interval["rows"],
        }
        for name, nbytes in expected.items()
        for interval in [calibration()["metrics"][name]]
    }


def _scaled(nbytes: int, ratio: float | None) -> int | None:
    return None if ratio is None else round(nbytes * ratio)


def calibrated_line(rank: RankResult) -> str:
    """`Calibrated, low / expected / high of 90 % of published runs, GiB: allocated 9.98 / 10.00 / 10.01 (9 rows)`"""
    parts = []
    for name, row in calibrated(rank).items():
        if row["low"] is None:
            parts.append(f"{LABELS[name]} {gib(row['expected'])}, too few rows for a range ({row['rows']})")
        else:
            numbers = " / ".join(gib(row[key]) for key in ("low", "expected", "high"))
            parts.append(f"{LABELS[name]} {numbers} ({row['rows']} rows)")
    share = round(100 * calibration()["covered"])
    return f"Calibrated, low / expected / high of {share} % of published runs, GiB: {'; '.join(parts)}"


def threshold_line(fit: Fit) -> str | None:
    """A sentence for a job that needs less of the GPU than any that ran out of memory did; None for every other."""
    threshold = calibration()["threshold"]
    if fit.device_range[1] >= threshold["share"] * fit.gpu.usable_bytes:
        return None
    return (
        f"Below {100 * threshold['share']:.0f} % of the usable memory, where none of {threshold['cases']} published "
        "cases ran out of it"
    )
