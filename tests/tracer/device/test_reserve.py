"""A liveness through the caching allocator: numbers worked out in the margin."""

from dataclasses import replace

import numpy as np
import pytest

from metapeak.tracer.device.allocator_config import parse_allocator_config
from metapeak.tracer.device.blocks import ACTION_NAMES, ALLOC, FREE
from metapeak.tracer.device.reserve import allocation_order, reserve
from metapeak.tracer.errors import InputError
from metapeak.tracer.liveness import Liveness

MIB = 1 << 20


def liveness_of(*storages, ops):
    """A liveness of (birth, death, bytes) over `ops` operations."""
    birth, death, nbytes = (np.array(column, dtype=np.int64) for column in zip(*storages))
    zeros = np.zeros(len(birth), dtype=np.int64)
    return Liveness(
        birth=birth,
        death=death,
        nbytes=nbytes,
        category=zeros,
        module=zeros,
        source=zeros - 1,
        dtype=zeros,
        shapes=[(int(n),) for n in nbytes],
        op=np.zeros(ops, dtype=np.int64),
        op_phase=np.zeros(ops, dtype=np.int64),
        op_iteration=np.zeros(ops, dtype=np.int64),
        op_module=np.zeros(ops, dtype=np.int64),
        op_recompute=np.zeros(ops, dtype=bool),
        op_names=["op"],
        module_names=[""],
        source_names=[],
        dtype_names=["uint8"],
    )


def test_an_operation_allocates_before_what_it_made_superfluous_is_freed():
    """op 0 makes 30 MiB, op 1 makes 30 MiB from it: both are live at once, so two segments; op 2 reuses the first."""
    step = liveness_of((0, 2, 30 * MIB), (1, 4, 30 * MIB), (2, 4, 30 * MIB), ops=3)
    storage, is_alloc, op = allocation_order(step)
    assert list(zip(storage.tolist(), is_alloc.tolist(), op.tolist())) == [
        (0, True, 0),
        (1, True, 1),
        (0, False, 2),
        (2, True, 2),
    ]
    result = reserve(step)
    assert result.allocated_peak == result.reserved_peak == result.unfragmented_peak == 60 * MIB


def test_allocated_counts_what_is_not_split_off():
    """11.5 MiB in a segment of 12 MiB: 0.5 MiB is not more than 1 MiB, so the block is the whole segment."""
    result = reserve(liveness_of((0, 2, 23 * MIB // 2), (0, 2, 100), ops=1))
    assert result.allocated_peak == 12 * MIB + 512
    assert result.reserved_peak == 14 * MIB
    assert result.reserved_range == (14 * MIB, 14 * MIB)


def test_fragmentation_lies_between_the_range():
    """Two of 16 MiB are freed and leave holes of 16 MiB, so 32 MiB need a new segment: 80 MiB where 64 would do."""
    step = liveness_of((0, 3, 16 * MIB), (0, 1, 16 * MIB), (0, 3, 16 * MIB), (1, 3, 32 * MIB), ops=2)
    result = reserve(step)
    assert (result.unfragmented_peak, result.reserved_peak) == (64 * MIB, 80 * MIB)
    assert result.reserved_range == (64 * MIB, 80 * MIB)


def test_capacity_makes_cached_segments_go_back_and_then_ends_the_step():
    step = liveness_of((0, 3, 16 * MIB), (0, 1, 16 * MIB), (0, 3, 16 * MIB), (1, 3, 32 * MIB), ops=2)
    fits = reserve(step, capacity=64 * MIB)
    assert (fits.retries, fits.oom, fits.reserved_peak) == (1, None, 64 * MIB)
    fails = reserve(step, capacity=63 * MIB)
    assert (fails.oom.op, fails.oom.storage, fails.oom.requested) == (1, 3, 32 * MIB)
    assert fails.oom.reserved == 32 * MIB  # the retry gave the hole back and it was not enough
    assert [ACTION_NAMES[action] for action in fails.events.action[-2:]] == ["segment_free", "oom"]


def test_events_and_segments_are_those_of_a_snapshot():
    step = liveness_of((0, 1, 16 * MIB), (0, 3, 100), (1, 2, 0), (1, 3, 16 * MIB), ops=2)
    result = reserve(step)
    events = result.events
    assert [ACTION_NAMES[action] for action in events.action] == [
        "segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed", "alloc",
    ]  # fmt: skip
    assert events.size.tolist() == [16 * MIB, 16 * MIB, 2 * MIB, 100, 16 * MIB, 16 * MIB, 16 * MIB]
    assert events.storage.tolist() == [-1, 0, -1, 1, 0, 0, 3]
    assert events.op.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert events.reserved.tolist() == [16 * MIB] * 2 + [18 * MIB] * 5
    assert events.allocated.tolist()[-1] == 16 * MIB + 512
    assert events.address[1] == events.address[6]
    blocks = [(block.size, block.state == FREE) for segment in result.end_segments for block in segment.blocks]
    assert sorted(blocks) == [(512, False), (2 * MIB - 512, True), (16 * MIB, False)]
    assert result.peak_segments == result.end_segments
    assert (events.action == ALLOC).sum() == 3


def test_streams_do_not_share_cached_blocks():
    step = liveness_of((0, 1, 16 * MIB), (1, 3, 16 * MIB), ops=2)
    assert reserve(step).reserved_peak == 16 * MIB
    assert reserve(replace(step, stream=np.array([0, 7]))).reserved_peak == 32 * MIB


def test_a_memory_fraction_needs_a_capacity():
    config = parse_allocator_config("per_process_memory_fraction:0.5")
    step = liveness_of((0, 2, 40 * MIB), ops=1)
    with pytest.raises(InputError, match="--gpu-memory"):
        reserve(step, config)
    assert reserve(step, config, capacity=80 * MIB).oom is None
    assert reserve(step, config, capacity=78 * MIB).oom is not None


def test_a_step_without_storages_takes_nothing():
    result = reserve(liveness_of((0, 0, 5), ops=1))
    assert (result.allocated_peak, result.reserved_peak, result.unfragmented_peak, len(result.events)) == (0, 0, 0, 0)
