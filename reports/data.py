"""A Simulation as the JSON-able record of the contract (schema_version 1)."""

from __future__ import annotations

from typing import Any

from metapeak.reports.calibration import calibrated
from metapeak.reports.dtypes import dtype_rows
from metapeak.reports.life import life_rows
from metapeak.reports.pipeline import pipeline_record
from metapeak.tracer.liveness import Category
from metapeak.tracer.simulation import RankResult, Simulation

SCHEMA_VERSION = 1

# Names of the categories in reports and JSON.
CATEGORY_NAMES = {
    Category.PARAMETER: "parameters",
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER_STATE: "optimizer_states",
    Category.ACTIVATION: "activations",
    Category.TEMPORARY: "temporaries",
    Category.BUFFER: "buffers",
    Category.INPUT: "inputs",
    Category.COMMUNICATION: "communication",
    Category.WORKSPACE: "workspace",
}


def record_of(simulation: Simulation) -> dict[str, Any]:
    """The record: plain dictionaries, lists, strings, integers; bytes are integers. Unmodelled numbers are None."""
    how = simulation.how
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model_record(simulation),
        "options": options_record(simulation),
        "how": {
            "traced": True,
            "torch": how.torch,
            "transformers": how.transformers,
            "seconds": {stage: round(seconds, 3) for stage, seconds in how.seconds.items()},
            "assumptions": list(how.assumptions),
            "not_modelled": list(how.not_modelled),
            "cached": how.cached,
        },
        "dtypes": dtype_rows(simulation),
        "ranks": [_rank(rank) for rank in simulation.ranks],
        "life": life_rows(simulation),
        "pipeline": pipeline_record(simulation),
        "fit": _fit(simulation),
        "suggestions": suggestions_of(simulation),
        "verified": None if simulation.verified is None else list(simulation.verified),
    }


def suggestions_of(simulation: Simulation) -> list[dict[str, Any]] | None:
    """What would fit, cheapest first; None where nobody asked or it fits as it is."""
    return None if simulation.suggestions is None else list(simulation.suggestions["found"])


def model_record(simulation: Simulation) -> dict[str, Any]:
    model = simulation.model
    return {
        "id": model.id,
        "source": model.source,
        "architecture": model.architecture,
        "parameters": model.parameters,
        "trainable_parameters": model.trainable_parameters,
        "parameter_bytes": model.parameter_bytes,
    }


def options_record(simulation: Simulation) -> dict[str, Any]:
    return {name: {"value": option.value, "from": option.origin} for name, option in simulation.options.items()}


def _rank(rank: RankResult) -> dict[str, Any]:
    peak_at = rank.peak_at
    return {
        "rank": rank.rank,
        "count": rank.count,
        "coordinates": dict(rank.coordinates),
        "peak": {
            "requested_bytes": rank.requested_bytes,
            "allocated_bytes": rank.allocated_bytes,
            "reserved_bytes": rank.reserved_bytes,
            "device_bytes": rank.device_bytes,
            "device_range": _range(*rank.device_range),
        },
        "calibrated": calibrated(rank),
        "peak_at": {
            "iteration": peak_at.iteration,
            "phase": peak_at.phase,
            "op": peak_at.op,
            "module": peak_at.module,
        },
        "breakdown": {CATEGORY_NAMES[category]: nbytes for category, nbytes in rank.breakdown.items()},
        "not_shared": dict(rank.not_shared),
        "overheads": {
            item.name: {**_range(item.low_bytes, item.high_bytes), "tag": item.tag, "source": item.source}
            for item in rank.overheads.items
        },
        "phases": [
            {
                "iteration": phase.iteration,
                "phase": phase.phase,
                "peak_bytes": phase.peak_bytes,
                "end_bytes": phase.end_bytes,
            }
            for phase in rank.phases
        ],
        "host": {phase: dict(row) for phase, row in rank.host.items()},
        "steady_bytes": rank.steady_bytes,
        "largest": [
            {
                "bytes": tensor.nbytes,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "category": tensor.category,
                "module": tensor.module,
                "born_phase": tensor.born_phase,
                "source_line": tensor.source_line,
            }
            for tensor in rank.largest()
        ],
        "modules": module_rows(rank),
    }


def _range(low: int, high: int) -> dict[str, int]:
    return {"low": low, "high": high}


def _fit(simulation: Simulation) -> dict[str, Any] | None:
    if simulation.fit is None:
        return None
    return {
        "gpu": simulation.fit.gpu.id,
        "capacity_bytes": simulation.fit.gpu.usable_bytes,
        "verdict": simulation.fit.verdict.value,
        "headroom_bytes": simulation.fit.headroom_bytes,
        "device_range": _range(*simulation.fit.device_range),
        "capacity_from": simulation.fit.gpu.usable_from,
    }


def module_rows(rank: RankResult, depth: int | None = None) -> list[dict[str, Any]]:
    """Bytes alive at the peak by module and category, a row a module of at most `depth` parts, in model order.

    Repeated blocks (paths that differ only in a number) are one row with `count`; bytes are their sum.
    """
    table = rank.liveness.by_module(rank.peak_index)
    rows: dict[str, dict[str, Any]] = {}
    members: dict[str, set[str]] = {}
    order = {name: position for position, name in enumerate(rank.liveness.module_names)}
    for path in sorted(table, key=lambda path: order.get(path, len(order))):
        parts = path.split(".") if path else []
        shown = parts if depth is None else parts[:depth]
        pattern = ".".join("*" if part.isdigit() else part for part in shown)
        row = rows.setdefault(pattern, {"module": pattern, "count": 0, "bytes": 0})
        members.setdefault(pattern, set()).add(".".join(shown))
        for category, nbytes in table[path].items():
            name = CATEGORY_NAMES[category]
            row[name] = row.get(name, 0) + nbytes
            row["bytes"] += nbytes
    for pattern, row in rows.items():
        row["count"] = len(members[pattern])
    return list(rows.values())
