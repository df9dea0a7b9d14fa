"""Classes of ranks against one rank at a time, and degrees that do not fit together."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metapeak.strategies.parallel.layout import Layout
from metapeak.tracer.errors import InputError

DEGREES = st.sampled_from([1, 2, 3, 4])


def rows(size, degree, place):
    """Rows that a place holds of a dimension cut into chunks of ceil(size / degree)."""
    chunk = -(-size // degree)
    return max(0, min(chunk, size - place * chunk))


def held(layout, rank, sizes, expert_sizes, in_ring):
    """What a rank holds: rows of every dimension, and its place in the ring."""
    place = rank // layout.tp % (layout.dp_shard * layout.cp)
    expert_place = rank // layout.ep % layout.efsdp
    ring = layout.coordinates(rank)["cp"]
    kind = "first" if ring == 0 else "last" if ring == layout.cp - 1 else "between"
    return (
        tuple(rows(size, layout.fsdp, place) for size in sizes),
        tuple(rows(size, layout.efsdp, expert_place) for size in expert_sizes),
        kind if in_ring and layout.cp > 1 else "",
    )


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    degrees=st.fixed_dictionaries({axis: DEGREES for axis in ("dp_replicate", "dp_shard", "cp", "tp")}),
    spread=st.integers(0, 3),
    sizes=st.lists(st.integers(1, 9), max_size=3),
    expert_sizes=st.lists(st.integers(1, 5), max_size=2),
    in_ring=st.booleans(),
)
def test_classes_hold_ranks_that_are_alike(degrees, spread, sizes, expert_sizes, in_ring):
    fsdp, tp = degrees["dp_shard"] * degrees["cp"], degrees["tp"]
    eps = [ep for ep in range(tp, fsdp * tp + 1, tp) if fsdp * tp % ep == 0]
    layout = Layout(**degrees, ep=eps[spread % len(eps)])
    classes: dict = {}
    for rank in range(layout.world_size):
        classes.setdefault(held(layout, rank, sizes, expert_sizes, in_ring), []).append(rank)
    found = layout.rank_classes(sizes, expert_sizes, sequence_parts=in_ring)
    assert found == sorted((ranks[0], len(ranks)) for ranks in classes.values())


def test_experts_borrow_their_ranks():
    layout = Layout(dp_shard=4, cp=2, tp=2, ep=4)
    assert (layout.world_size, layout.fsdp, layout.efsdp) == (16, 8, 4)
    assert layout.groups == (16, 4, 2, 2, 8, 4, 4)
    for degrees, words in (({"tp": 4, "ep": 2}, "ep 2 / tp 4"), ({"dp_shard": 4, "ep": 3}, "/ ep 3 = 1.33")):
        with pytest.raises(InputError, match=words):
            Layout(**degrees)
