"""The terminal chart: every cell shows what the stack holds there, within the width, with and without colours."""

import io
import re

import numpy as np
from rich.console import Console

from metapeak.reports.timeline import ROWS, cells_of, columns_of, print_timeline


def drawn(rank, **console):
    out = io.StringIO()
    print_timeline(rank, Console(file=out, **console))
    return out.getvalue()


def test_cells_by_hand():
    #  bytes of three categories in four columns; rows stand for the bytes number 0, 5, 10 and the last of 15
    columns = np.array([[5, 5, 6, 0], [0, 5, 4, 0], [0, 5, 0, 1]])
    assert cells_of(columns, 15, rows=4).tolist() == [[0, 0, 0, 2], [-1, 1, 0, -1], [-1, 2, -1, -1], [-1, 2, -1, -1]]


def test_every_column_is_the_largest_operation_of_its_stretch(traced):
    liveness = traced.worst.liveness
    shown = columns_of(liveness, 40)
    assert len(shown) == 40 and (np.diff(shown) > 0).all()
    assert traced.worst.peak_index in shown or traced.worst.requested_bytes in liveness.live_bytes()[shown]


def test_the_chart_fits_and_names_what_it_draws(traced):
    for width in (40, 80, 200):
        text = drawn(traced.worst, width=width)
        lines = text.splitlines()
        assert max(map(len, lines)) <= width
        assert "\x1b" not in text
        assert "operations in running order, not time" in " ".join(text.split())
        assert sum("│" in line or "┤" in line for line in lines) == ROWS
        assert "p parameters" in text and "o optimizer states" in text
    assert "forward 1" in text and "backward 2" in text


def test_colours_only_where_they_can_be_seen(traced):
    coloured = drawn(traced.worst, width=80, force_terminal=True, color_system="truecolor", no_color=False)
    assert "\x1b[38;2;59;125;216m█" in coloured
    plain = drawn(traced.worst, width=80, force_terminal=True, color_system="truecolor", no_color=True)
    assert not re.search(r"\x1b\[[0-9;]*38;", plain) and "█" not in plain and "pppp" in plain
