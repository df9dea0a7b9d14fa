"""Plotly figures of the HTML report: live bytes over operations, and from live bytes to what the device holds.

plotly is the library because its JavaScript ships inside its Python package (4.8 MB), so a page needs no network;
because areas can be stacked, zoomed and hovered also by touch; and because `graph_objects` refuses misspelt options.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go

from metapeak.reports.curves import Curves, Span, curves, phase_spans
from metapeak.reports.data import CATEGORY_NAMES
from metapeak.reports.sizes import GIB, gib, size
from metapeak.tracer.gpus import Gpu
from metapeak.tracer.liveness import Category, Liveness
from metapeak.tracer.simulation import RankResult

# Fills of the areas, told apart also by those who see no red or green (after Okabe and Ito) and on black and on white.
COLOURS = {
    Category.PARAMETER: "#3b7dd8",
    Category.GRADIENT: "#e08a00",
    Category.OPTIMIZER_STATE: "#8a63c9",
    Category.ACTIVATION: "#12a07a",
    Category.TEMPORARY: "#d9534a",
    Category.BUFFER: "#6d7f8f",
    Category.INPUT: "#b89b00",
    Category.COMMUNICATION: "#c86aa5",
    Category.WORKSPACE: "#8c6d55",
}
_SPARE_COLOUR = "#808080"

PEAK_TENSORS = 10
# Points of all ranks together; each takes about 250 bytes of the file.
MAX_POINTS = 1600
# A capacity farther above the peak than this would flatten the curve.
CAPACITY_SHOWN_UP_TO = 1.8


def timeline(rank: RankResult, gpu: Gpu | None, limit: int = MAX_POINTS) -> go.Figure:
    """Live bytes by category, stacked, over the operations; the peak marked, its tensors in its hover text."""
    liveness = rank.liveness
    drawn = curves(liveness, limit)
    x = drawn.index.astype(np.int32)
    figure = go.Figure()
    for category, nbytes in zip(drawn.categories, drawn.nbytes):
        figure.add_scatter(
            x=x,
            y=_gib_column(nbytes),
            name=_name(category),
            stackgroup="live",
            mode="lines",
            line={"width": 0, "shape": "hv"},
            fillcolor=COLOURS.get(category, _SPARE_COLOUR),
            hoverinfo="skip",
        )
    peak = rank.peak_index
    texts = [_hover(liveness, drawn, column, rank if index == peak else None) for column, index in enumerate(x)]
    figure.add_scatter(
        x=x,
        y=_gib_column(drawn.total),
        name="live",
        mode="lines",
        line={"width": 1, "shape": "hv", "color": "#555"},
        text=texts,
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
    )
    _mark_peak(figure, rank)
    _mark_phases(figure, phase_spans(liveness), drawn.num_ops)
    top = rank.requested_bytes / GIB
    if gpu is not None and gpu.usable_bytes <= CAPACITY_SHOWN_UP_TO * rank.requested_bytes:
        top = max(top, gpu.usable_bytes / GIB)
        figure.add_hline(
            y=gpu.usable_bytes / GIB,
            line={"dash": "dash", "width": 2, "color": "#d9534a"},
            annotation={"text": f"usable on {escape(gpu.id)}, {gib(gpu.usable_bytes)} GiB", "font": {"size": 12}},
            annotation_position="top left",
        )
    figure.update_layout(
        hovermode="x",
        hoverlabel={"align": "left", "namelength": -1},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0, "traceorder": "normal"},
        margin={"l": 56, "r": 12, "t": 8, "b": 48},
        xaxis={"title": {"text": "operations in running order (not time)"}, "range": [0, drawn.num_ops]},
        yaxis={"title": {"text": "live bytes, GiB"}, "range": [0, top * 1.25 or 1], "tickformat": "~g"},
        template=None,
    )
    return figure


def _gib_column(nbytes: np.ndarray) -> np.ndarray:
    return (nbytes / GIB).astype(np.float64)


def _name(category: Category) -> str:
    return CATEGORY_NAMES[category].replace("_", " ")


def _hover(liveness: Liveness, drawn: Curves, column: int, peak_of: RankResult | None) -> str:
    """What the label at one operation says: where it is, how much is alive, and at the peak, which tensors."""
    at = liveness.instant(int(drawn.index[column]))
    step = f"{at.phase} {at.iteration}" if at.iteration else at.phase
    lines = [f"<b>{gib(int(drawn.total[column]))} GiB</b> live, {step}{', recompute' if at.recompute else ''}"]
    lines.append(escape(_shorten(at.op)))
    if at.module:
        lines.append(escape(_shorten(at.module)))
    if peak_of is not None:
        lines[0] = f"<b>Peak</b> {lines[0]}"
        lines += _tensors(peak_of)
    return "<br>".join(lines)


def _tensors(rank: RankResult) -> list[str]:
    lines = [f"{PEAK_TENSORS} largest tensors alive:"]
    for tensor in rank.largest(PEAK_TENSORS):
        where = tensor.module or tensor.source_line or "(the model itself)"
        lines.append(escape(f"{size(tensor.nbytes)}  {tensor.category.replace('_', ' ')}  {_shorten(where, 34)}"))
    return lines


def _shorten(text: str, length: int = 44) -> str:
    """The end of a long name: that is where names differ."""
    return text if len(text) <= length else "…" + text[-(length - 1) :]


def _mark_peak(figure: go.Figure, rank: RankResult) -> None:
    """A dot and a label. The label, large enough for a finger, has the tensors in its own hover text."""
    x, y = rank.peak_index, rank.requested_bytes / GIB
    figure.add_scatter(
        x=[x],
        y=[y],
        mode="markers",
        name="peak",
        marker={"size": 11, "color": "#111", "line": {"color": "#fff", "width": 2}},
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
    )
    right_half = x > rank.liveness.num_ops / 2
    at = rank.peak_at
    tensors = [f"<b>Peak {gib(rank.requested_bytes)} GiB</b> live, {at.phase} {at.iteration}", escape(at.op)]
    figure.add_annotation(
        x=x,
        y=y,
        text=f"<b>peak {gib(rank.requested_bytes)} GiB</b>",
        hovertext="<br>".join([*tensors, *_tensors(rank)]),
        name="peak",
        captureevents=True,
        showarrow=True,
        arrowwidth=1.5,
        ax=-76 if right_half else 76,
        ay=0,
        borderpad=4,
        borderwidth=1,
        bgcolor="#fff",
        font={"color": "#111", "size": 13},
    )


def _mark_phases(figure: go.Figure, spans: list[Span], num_ops: int) -> None:
    """A thin line where each phase begins, its name at the foot when there is room for it."""
    for span in spans:
        if span.start:
            figure.add_vline(x=span.start, line={"width": 1, "color": "#888", "dash": "dot"})
        if span.end - span.start > 0.09 * num_ops:
            figure.add_annotation(
                x=(span.start + span.end) / 2,
                y=0.995,
                yref="paper",
                yanchor="top",
                text=span.label,
                showarrow=False,
                font={"size": 11},
                name="phase",
            )


def waterfall(steps: list[tuple[str, int, str]]) -> go.Figure:
    """Bars from live to device. `steps`: (name, bytes, traced | derived | assumed), each a running total."""
    names = [f"{name}<br>({tag})" for name, _, tag in steps]
    values = [nbytes / GIB for _, nbytes, _ in steps]
    rises = [values[0], *(after - before for before, after in pairwise(values))]
    labels = [
        gib(nbytes) if not position else f"{gib(nbytes)}<br>{gib(nbytes - steps[position - 1][1], signed=True)}"
        for position, (_, nbytes, _) in enumerate(steps)
    ]
    figure = go.Figure()
    figure.add_bar(
        x=names, y=[0, *values[:-1]], marker={"color": "rgba(59,125,216,0.35)"}, hoverinfo="skip", showlegend=False
    )
    figure.add_bar(
        x=names,
        y=rises,
        text=labels,
        textposition="outside",
        cliponaxis=False,
        marker={"color": ["#3b7dd8", *["#e08a00"] * (len(steps) - 1)]},
        hovertemplate="%{x}<br>%{text} GiB<extra></extra>",
        showlegend=False,
    )
    figure.update_layout(
        barmode="stack",
        bargap=0.35,
        margin={"l": 56, "r": 12, "t": 24, "b": 48},
        yaxis={"title": {"text": "GiB"}, "range": [0, max(values) * 1.18 or 1], "tickformat": "~g"},
        xaxis={"fixedrange": True},
        template=None,
    )
    return figure
