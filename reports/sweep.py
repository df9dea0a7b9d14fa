"""Sweeps as a table, CSV, JSON, Parquet and a heat map; the largest value that fits as a sentence."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from metapeak.reports.data import CATEGORY_NAMES, SCHEMA_VERSION, model_record
from metapeak.reports.sizes import GIB, gib
from metapeak.strategies.sweep import Largest, Point, Sweep
from metapeak.tracer.errors import InputError


def sweep_record(found: Sweep) -> dict[str, Any]:
    """The sweep as plain values; bytes are integers."""
    first = next(point.simulation for point in found.points if point.simulation is not None)
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model_record(first),
        "swept": {name: list(values) for name, values in found.swept.items()},
        "points": [_point(point) for point in found.points],
        "traces": found.traces,
    }


def _point(point: Point) -> dict[str, Any]:
    if point.simulation is None:
        return {"options": dict(point.values), "refused": point.refused}
    simulation, rank = point.simulation, point.simulation.worst
    fit = simulation.fit
    return {
        "options": dict(point.values),
        "peak": {
            "requested_bytes": rank.requested_bytes,
            "allocated_bytes": rank.allocated_bytes,
            "reserved_bytes": rank.reserved_bytes,
            "device_bytes": rank.device_bytes,
        },
        "peak_at": {"iteration": rank.peak_at.iteration, "phase": rank.peak_at.phase, "op": rank.peak_at.op},
        "breakdown": {CATEGORY_NAMES[category]: nbytes for category, nbytes in rank.breakdown.items()},
        "steady_bytes": rank.steady_bytes,
        "trainable_parameters": simulation.model.trainable_parameters,
        "fit": None
        if fit is None
        else {"gpu": fit.gpu.id, "verdict": fit.verdict.value, "headroom_bytes": fit.headroom_bytes},
        "refused": None,
    }


def sweep_rows(found: Sweep) -> tuple[list[str], list[list[Any]]]:
    """(column names, a row a point): flat values, as CSV and Parquet have them."""
    names = [*found.swept, "requested_bytes", "allocated_bytes", "reserved_bytes", "device_bytes", "steady_bytes"]
    names += ["peak_iteration", "peak_phase", "peak_op", "verdict", "headroom_bytes", "refused"]
    rows = []
    for point, record in zip(found.points, map(_point, found.points)):
        swept = [_cell(point.values[name]) for name in found.swept]
        if point.simulation is None:
            rows.append([*swept, *[None] * 10, point.refused])
            continue
        at, fit = record["peak_at"], record["fit"] or {}
        numbers = [*record["peak"].values(), record["steady_bytes"], at["iteration"], at["phase"], at["op"]]
        rows.append([*swept, *numbers, fit.get("verdict"), fit.get("headroom_bytes"), None])
    return names, rows


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def sweep_csv(found: Sweep) -> str:
    """The rows as CSV with a header."""
    names, rows = sweep_rows(found)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return out.getvalue()


def sweep_parquet(found: Sweep) -> bytes:
    """The rows as a Parquet file. Raises InputError without pyarrow."""
    check_parquet()
    import pyarrow
    import pyarrow.parquet

    names, rows = sweep_rows(found)
    columns = {name: [row[position] for row in rows] for position, name in enumerate(names)}
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def check_parquet() -> None:
    """Raise InputError where Parquet cannot be written."""
    from importlib.util import find_spec

    if find_spec("pyarrow") is None:
        raise InputError("--parquet needs the package pyarrow, which is not installed. Install it, or give --csv FILE.")


def sweep_heatmap(found: Sweep) -> str:
    """A page with a heat map of device GiB for each combination of all but the last two options. Raises InputError for
    a sweep of fewer than two options.
    """
    check_heatmap(found.swept)
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    *outer, down, across = found.swept
    groups: dict[tuple, dict[tuple, Point]] = {}
    for point in found.points:
        key = tuple(point.values[name] for name in outer)
        groups.setdefault(key, {})[point.values[down], point.values[across]] = point
    titles = [", ".join(f"{name} {_cell(value)}" for name, value in zip(outer, key)) for key in groups]
    figure = make_subplots(rows=len(groups), cols=1, subplot_titles=titles if outer else None)
    highest = max(point.simulation.worst.device_bytes for point in found.points if point.simulation is not None) / GIB
    for number, points in enumerate(groups.values(), 1):
        cells = [[points[y, x] for x in found.swept[across]] for y in found.swept[down]]
        figure.add_trace(
            go.Heatmap(
                x=[str(_cell(value)) for value in found.swept[across]],
                y=[str(_cell(value)) for value in found.swept[down]],
                z=[[one.simulation and one.simulation.worst.device_bytes / GIB for one in row] for row in cells],
                text=[[_heat_text(one) for one in row] for row in cells],
                texttemplate="%{text}",
                zmin=0,
                zmax=highest,
                colorbar={"title": "GiB"},
                colorscale="Viridis",
            ),
            row=number,
            col=1,
        )
        figure.update_xaxes(title_text=across, type="category", row=number, col=1)
        figure.update_yaxes(title_text=down, type="category", row=number, col=1)
    figure.update_layout(title="Device memory, GiB", height=200 + 320 * len(groups))
    return figure.to_html(include_plotlyjs=True, full_html=True)


def check_heatmap(swept: Any) -> None:
    """Raise InputError for a sweep that is no plane."""
    if len(swept) < 2:
        raise InputError("--heatmap needs at least two options with several values.")


def _heat_text(point: Point) -> str:
    if point.simulation is None:
        return "refused"
    fit = point.simulation.fit
    return gib(point.simulation.worst.device_bytes) + ("" if fit is None else f"<br>{fit.verdict.value}")


def print_sweep(found: Sweep, console: Console) -> None:
    """Print a row a point."""
    first = next(point.simulation for point in found.points if point.simulation is not None)
    console.print(Text.assemble((first.model.id, "bold"), f"   {len(found.points)} estimates, {found.traces} traced"))
    table = Table(title="GiB", title_justify="left", box=None, pad_edge=False)
    for name in found.swept:
        table.add_column(name, overflow="fold")
    numbers = ("live", "allocated", "reserved", "device", "between steps")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("peak in", *(("verdict",) if first.fit is not None else ())):
        table.add_column(name, overflow="fold")
    for point in found.points:
        swept = [str(_cell(value)) for value in point.values.values()]
        table.add_row(*swept, *_cells(point, judged=first.fit is not None))
    console.print(table)


def _cells(point: Point, *, judged: bool) -> Sequence[str]:
    if point.simulation is None:
        return [*["-"] * 5, f"refused: {point.refused}"]
    rank, fit = point.simulation.worst, point.simulation.fit
    sizes = (rank.requested_bytes, rank.allocated_bytes, rank.reserved_bytes, rank.device_bytes, rank.steady_bytes)
    verdict = [f"{fit.verdict.value} ({gib(fit.headroom_bytes, signed=True)})"] if judged and fit is not None else []
    return [*map(gib, sizes), f"{rank.peak_at.phase} of {rank.peak_at.iteration}", *verdict]


def largest_record(found: Largest) -> dict[str, Any]:
    """What `--largest` adds to the record of the estimate at that value."""
    beyond = found.beyond
    return {
        "option": found.option,
        "value": found.value,
        "next": {
            "value": found.value + 1,
            "device_bytes": None if beyond is None else beyond.worst.device_bytes,
            "verdict": None if beyond is None else beyond.fit.verdict.value,
            "refused": found.refused,
        },
        "tried": [{"value": value, "fits": fits} for value, fits in found.tried.items()],
    }


def describe_largest(found: Largest) -> str:
    """The result in one sentence."""
    gpu, name = found.simulation.fit.gpu.id, found.option
    if not found.value:
        return f"No {name} fits {gpu}: with 1 it needs {gib(found.simulation.worst.device_bytes)} GiB."
    if found.beyond is None:
        return f"Largest {name} that fits {gpu}: {found.value} ({found.value + 1} is refused: {found.refused})"
    needs, verdict = gib(found.beyond.worst.device_bytes), found.beyond.fit.verdict.value
    return f"Largest {name} that fits {gpu}: {found.value} ({found.value + 1} needs {needs} GiB: {verdict})"
