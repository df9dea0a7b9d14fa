"""Thinned curves keep real operations with exact bytes, and every peak."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from metapeak.reports.curves import bytes_by_category, curves, keep_peaks, phase_spans
from metapeak.tracer.liveness import Category


def test_bytes_by_category_equal_the_breakdown_at_every_operation(traced):
    liveness = traced.worst.liveness
    table = bytes_by_category(liveness)
    assert (table.sum(axis=0) == liveness.live_bytes()).all()
    for index in range(0, liveness.num_ops, 97):
        assert {category: table[category, index] for category in Category} == liveness.breakdown(index)


def test_thinned_curves_are_exact_and_keep_every_peak(traced):
    rank = traced.worst
    liveness, table = rank.liveness, bytes_by_category(rank.liveness)
    drawn = curves(liveness, 60)
    assert len(drawn.index) < 200 < liveness.num_ops
    assert (drawn.nbytes == table[list(drawn.categories)][:, drawn.index]).all()
    assert rank.peak_index in drawn.index
    assert drawn.total.max() == rank.requested_bytes
    for span in phase_spans(liveness):
        kept = (drawn.index >= span.start) & (drawn.index < span.end)
        assert drawn.total[kept].max() == table.sum(axis=0)[span.start : span.end].max()
        for row, category in enumerate(drawn.categories):
            assert drawn.nbytes[row, kept].max() == table[category, span.start : span.end].max()


def test_a_short_step_is_kept_whole(traced):
    liveness = traced.worst.liveness
    assert curves(liveness, liveness.num_ops).index.tolist() == list(range(liveness.num_ops))


@settings(derandomize=True)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=300), st.integers(4, 80))
def test_keep_peaks_keeps_extremes_in_order(values, limit):
    values = np.array(values)
    kept = keep_peaks(values, limit)
    assert (np.diff(kept) > 0).all() and kept[0] == 0 and kept[-1] == len(values) - 1
    assert len(kept) <= max(limit, 4)
    assert values[kept].max() == values.max() and values[kept].min() == values.min()
