"""A terminal chart of live bytes over the step, stacked by category, drawn by plotext."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from rich.columns import Columns
from rich.console import Console
from rich.text import Text

from metapeak.reports.curves import bytes_by_category, phase_spans
from metapeak.reports.data import CATEGORY_NAMES
from metapeak.reports.sizes import gib
from metapeak.tracer.liveness import Category, Liveness
from metapeak.tracer.simulation import RankResult

HEIGHT = 16
MIN_WIDTH, MAX_WIDTH = 24, 160
# What plotext's frame and its numbers take of the width and height.
_AXIS_WIDTH = 8
ROWS = HEIGHT - 3

# Terminal colours by category, as the HTML report's; without colours, letters fill the areas.
_COLOURS = {
    Category.PARAMETER: (59, 125, 216),
    Category.GRADIENT: (224, 138, 0),
    Category.OPTIMIZER_STATE: (138, 99, 201),
    Category.ACTIVATION: (18, 160, 122),
    Category.TEMPORARY: (217, 83, 74),
    Category.BUFFER: (109, 127, 143),
    Category.INPUT: (184, 155, 0),
    Category.COMMUNICATION: (200, 106, 165),
    Category.WORKSPACE: (140, 109, 85),
}
_SPARE_COLOUR = (128, 128, 128)


def columns_of(liveness: Liveness, width: int) -> np.ndarray:
    """The operation shown in each of `width` columns: of an equal stretch of the step, the one with most alive."""
    total = liveness.live_bytes()
    edges = np.linspace(0, len(total), min(width, len(total)) + 1).astype(np.int64)
    return np.array([start + int(total[start:end].argmax()) for start, end in pairwise(edges.tolist())])


def print_timeline(rank: RankResult, console: Console) -> None:
    """Print the chart, as wide as the console; in its colours, or with a letter for each category where it has none."""
    coloured = console.color_system is not None and not console.no_color
    width = min(max(console.width - 1, MIN_WIDTH), MAX_WIDTH)
    chart, used = _chart(rank, width, coloured)
    console.print()
    console.print(Text.assemble(("Live bytes over the step, GiB", "bold"), " (operations in running order, not time)"))
    console.print(Text.from_ansi(chart), no_wrap=True, crop=False)
    legend = []
    for category in used:
        colour = "rgb({},{},{})".format(*_COLOURS.get(category, _SPARE_COLOUR))
        name = CATEGORY_NAMES[category].replace("_", " ")
        legend.append(Text.assemble((f"{_letter(category, coloured)} ", colour if coloured else ""), name))
    console.print(Columns(legend, padding=(0, 2)))


def cells_of(columns: np.ndarray, top: int, rows: int = ROWS) -> np.ndarray:
    """Which category is drawn in each cell, shape [rows, columns], bottom row first; -1 where nothing is.

    `columns`: bytes by category, shape [categories, columns]. Row r stands for top * r / (rows - 1) bytes and shows the
    category that holds this byte of the stack.
    """
    stack = np.cumsum(columns, axis=0)
    cells = np.full((rows, columns.shape[1]), -1)
    for row in range(rows):
        level = min(top * row // (rows - 1), top - 1)  # the topmost byte is the last one that is held
        cells[row] = np.where(stack[-1] > level, (stack > level).argmax(axis=0), -1)
    return cells


def _letter(category: Category, coloured: bool) -> str:
    return "█" if coloured else CATEGORY_NAMES[category][0]


def _chart(rank: RankResult, width: int, coloured: bool) -> tuple[str, list[Category]]:
    """(the chart's text, the categories in it)."""
    import plotext

    liveness = rank.liveness
    shown = columns_of(liveness, width - _AXIS_WIDTH)
    cells = cells_of(bytes_by_category(liveness)[:, shown], rank.requested_bytes)
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, HEIGHT)
    figure.theme("colorless")
    used = [category for category in Category if (cells == category).any()]
    for category in used:
        rows, columns = np.nonzero(cells == category)
        colour = _COLOURS.get(category, _SPARE_COLOUR) if coloured else None
        marker = plotext.marker(_letter(category, coloured), colour)
        figure.draw(figure.signal(columns.tolist(), rows.tolist(), marker=marker))
    figure.ruler("x").lim(0, len(shown) - 1)
    figure.ruler("y").lim(0, ROWS - 1)
    _ticks(figure, liveness, shown, rank.requested_bytes)
    return figure.build().string(colorless=not coloured), used


def _ticks(figure, liveness: Liveness, shown: np.ndarray, top: int) -> None:
    """Phases under the columns where they begin, bytes on the left up to the peak."""
    starts, names = [], []
    for span in phase_spans(liveness):
        first, after = np.searchsorted(shown, [span.start, span.end])
        if after - first > len(span.label):
            starts.append(int(first))
            names.append(span.label)
    # without any label plotext would give the row of labels to the canvas
    figure.ruler("x").ticks(starts or [0], names or [" "])
    figure.ruler("x").alignment("left")
    levels = range(0, ROWS, (ROWS - 1) // 4)
    figure.ruler("y").ticks(list(levels), [gib(top * level // (ROWS - 1)) for level in levels])
