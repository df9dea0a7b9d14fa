"""The alignment against the textbook table, on random sequences."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from metapeak.tracer.device.alignment import align, positions_mask


def longest(a, b):
    """Length of the longest common subsequence, by the table."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def aligned(a, b):
    return align([positions_mask([j for j, y in enumerate(b) if x == y], len(b)) for x in a], len(b))


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=40), st.lists(st.integers(0, 4), max_size=70))
def test_as_many_as_possible_are_matched_in_order(a, b):
    pairs = aligned(a, b)
    assert len(pairs) == longest(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in pairwise(pairs))


def test_sequences_longer_than_the_stretch_that_is_kept():
    a = [(7 * i * i + i) % 11 for i in range(700)]
    b = [(5 * i * i + 3 * i) % 11 for i in range(600)]
    pairs = aligned(a, b)
    assert len(pairs) == longest(a, b) and all(a[i] == b[j] for i, j in pairs)
    assert aligned(a, a) == [(i, i) for i in range(700)]
