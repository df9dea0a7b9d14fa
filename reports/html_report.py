"""One self-contained HTML page of an estimate: charts, tables and every sentence of the report, without a network.

Charts are plotly's; everything else is plain HTML that works without JavaScript. The page has light and dark colours
and adapts to the width of a phone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from metapeak.reports.data import CATEGORY_NAMES, record_of
from metapeak.reports.figures import COLOURS, MAX_POINTS, timeline, waterfall
from metapeak.reports.sizes import count, gib, size
from metapeak.reports.summary import describe_step
from metapeak.tracer.liveness import Category
from metapeak.tracer.simulation import RankResult, Simulation

# The module tree shows the modules with most bytes; a mixture of experts can have tens of thousands.
MAX_MODULES = 1500
MIN_POINTS_A_RANK = 200
MAX_TIMELINES = 16
LARGEST_SHOWN = 20

# What each number of a rank's peak is, and how it is known.
PEAK_STEPS = (
    ("requested_bytes", "live", "traced"),
    ("allocated_bytes", "allocated", "derived"),
    ("reserved_bytes", "reserved", "derived"),
    ("device_bytes", "device", "assumed"),
)


@dataclass(kw_only=True)
class ModuleNode:
    """A module with the bytes that it and everything inside it hold at the peak, by category."""

    name: str
    path: str
    by_category: dict[Category, int] = field(default_factory=dict)
    children: dict[str, ModuleNode] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.by_category.values())


def render_html(simulation: Simulation) -> str:
    """The page as text."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(gib=gib, size=size, count=count, words=lambda name: str(name).replace("_", " "))
    return environment.from_string(_resource("report.html")).render(_context(simulation))


def _context(simulation: Simulation) -> dict[str, Any]:
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    worst = simulation.worst
    record = record_of(simulation)
    ranks = sorted(simulation.ranks, key=lambda rank: (rank is not worst, rank.rank))[:MAX_TIMELINES]
    points = max(MAX_POINTS // len(ranks), MIN_POINTS_A_RANK)
    gpu = simulation.fit.gpu if simulation.fit else None
    charts = {
        f"timeline-{position}": json.loads(timeline(rank, gpu, points).to_json()) for position, rank in enumerate(ranks)
    }
    records = {rank["rank"]: rank for rank in record["ranks"]}
    charts["waterfall"] = json.loads(waterfall(peak_steps(records[worst.rank])).to_json())
    tree, left_out = module_tree(worst)
    return {
        "record": record,
        "worst": records[worst.rank],
        "ranks": [records[rank.rank] for rank in ranks],
        "rank_label": rank_label,
        "subtitle": describe_step(simulation, worst),
        "verdict": simulation.fit.verdict.value if simulation.fit else None,
        "steps": peak_steps(records[worst.rank]),
        "largest": worst.largest(LARGEST_SHOWN),
        "tree": tree,
        "modules_left_out": left_out,
        "colours": {CATEGORY_NAMES[category]: colour for category, colour in COLOURS.items()},
        "category_names": CATEGORY_NAMES,
        "style": Markup(_resource("report.css")),
        "script": Markup(_resource("report.js")),
        "plotly": Markup(get_plotlyjs()),
        "charts": Markup(json.dumps(charts, separators=(",", ":")).replace("<", "\\u003c")),
    }


def _resource(name: str) -> str:
    return (resources.files("metapeak.reports") / "html" / name).read_text(encoding="utf-8")


def peak_steps(rank: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """(name, bytes, how it is known) of the numbers of a rank's record that are modelled, from live to device."""
    return [(name, rank["peak"][key], tag) for key, name, tag in PEAK_STEPS if rank["peak"].get(key) is not None]


def rank_label(rank: Mapping[str, Any]) -> str:
    """`rank 0`, with the number of ranks like it and its coordinates.

    >>> rank_label({"rank": 2, "count": 4, "coordinates": {"pp": 1}})
    'rank 2 (4 alike; pp 1)'
    """
    remarks = [f"{rank['count']} alike"] if rank["count"] > 1 else []
    remarks += [", ".join(f"{axis} {position}" for axis, position in rank["coordinates"].items())]
    text = "; ".join(remark for remark in remarks if remark)
    return f"rank {rank['rank']}" + (f" ({text})" if text else "")


def module_tree(rank: RankResult) -> tuple[ModuleNode, int]:
    """(root, number of modules left out): who holds what at the peak, children in the model's order.

    The bytes of a module that is left out are in those of its parents.
    """
    liveness = rank.liveness
    order = {name: position for position, name in enumerate(liveness.module_names)}
    table = liveness.by_module(rank.peak_index)
    root = ModuleNode(name="(the model itself)", path="")
    nodes = 0
    by_size = sorted(table, key=lambda path: -sum(table[path].values()))
    shown = set(by_size[:MAX_MODULES])
    for path in sorted(table, key=lambda path: order.get(path, len(order))):
        node = root
        _add(node, table[path])
        if path not in shown:
            continue
        parts = path.split(".") if path else []
        for depth, part in enumerate(parts, start=1):
            node = node.children.setdefault(part, ModuleNode(name=part, path=".".join(parts[:depth])))
            _add(node, table[path])
        nodes += 1
    return root, len(table) - nodes


def _add(node: ModuleNode, by_category: Mapping[Category, int]) -> None:
    for category, nbytes in by_category.items():
        node.by_category[category] = node.by_category.get(category, 0) + nbytes
