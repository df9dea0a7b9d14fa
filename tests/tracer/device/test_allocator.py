"""Placement rules one by one, with numbers worked out by hand, and random histories against a naive allocator."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metapeak.tracer.device.address_space import InventedAddresses
from metapeak.tracer.device.allocator import CachingAllocator, OutOfMemory
from metapeak.tracer.device.allocator_config import parse_allocator_config
from metapeak.tracer.device.blocks import ACTION_NAMES, FREE
from tests.tracer.device.naive_allocator import NaiveAllocator

KIB, MIB = 1 << 10, 1 << 20


def make(text="", capacity=None, device_bytes=None):
    log = []
    driver = InventedAddresses(capacity=capacity)
    return CachingAllocator(parse_allocator_config(text), driver, device_bytes=device_bytes, log=log), log


def segments_made(log):
    return [size for action, _, size, _ in log if ACTION_NAMES[action] in ("segment_alloc", "segment_map")]


def segments_freed(log):
    return [size for action, _, size, _ in log if ACTION_NAMES[action] in ("segment_free", "segment_unmap")]


@pytest.mark.parametrize(
    "request_bytes, block, segment",
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the last size of the small pool
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),  # rounds to exactly 10 MiB: a segment of its own
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # 2 MiB - 512 remain: more than 1 MiB, so they are split off
        (19 * MIB, 20 * MIB, 20 * MIB),  # 1 MiB remains: not more than 1 MiB, so the block keeps it
        (8_519_680, 8_519_680, 20 * MIB),  # a cuBLAS workspace before Hopper
        (33_554_432, 33_554_432, 32 * MIB),  # and on it
    ],
)
def test_block_and_segment_of_a_first_request(request_bytes, block, segment):
    allocator, log = make()
    assert allocator.malloc(request_bytes).size == block
    assert segments_made(log) == [segment]
    assert (allocator.allocated, allocator.reserved) == (block, segment)


def test_the_small_pool_splits_from_512_bytes_on_and_the_large_one_above_1_mib():
    allocator, _ = make()
    allocator.malloc(MIB)
    assert allocator.malloc(MIB - 512).size == MIB - 512  # 512 bytes stay free
    assert allocator.malloc(512).size == 512
    assert allocator.reserved == 2 * MIB
    allocator, _ = make()
    first = allocator.malloc(30 * MIB)
    allocator.free(first)
    assert allocator.malloc(29 * MIB).size == 30 * MIB  # exactly 1 MiB would remain
    allocator, _ = make()
    allocator.free(allocator.malloc(30 * MIB))
    assert allocator.malloc(29 * MIB - 512).size == 29 * MIB - 512  # 1 MiB + 512 remain


def test_best_fit_takes_the_smallest_and_of_equal_ones_the_lowest_address():
    allocator, _ = make()
    blocks = [allocator.malloc(size * MIB) for size in (40, 32, 36, 32)]
    addresses = [block.address for block in blocks]
    assert addresses == sorted(addresses, reverse=True)  # as drivers on Linux mostly do
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(32 * MIB).address == addresses[3]
    assert allocator.malloc(32 * MIB).address == addresses[1]
    assert allocator.malloc(32 * MIB).address == addresses[2]
    assert allocator.reserved == 140 * MIB


def test_a_request_takes_the_low_end_and_neighbours_merge_when_freed():
    allocator, _ = make()
    a, b, c = (allocator.malloc(5 * MIB) for _ in range(3))
    assert (b.address - a.address, c.address - b.address) == (5 * MIB, 5 * MIB)
    allocator.free(a)
    allocator.free(c)  # merges with the 5 MiB at the end
    (segment,) = allocator.segments()
    assert [(block.size, block.state == FREE) for block in segment.blocks] == [
        (5 * MIB, True),
        (5 * MIB, False),
        (10 * MIB, True),
    ]
    allocator.free(b)
    (segment,) = allocator.segments()
    assert [block.size for block in segment.blocks] == [20 * MIB]


def test_segments_never_merge():
    allocator, log = make()
    a, b = allocator.malloc(32 * MIB), allocator.malloc(32 * MIB)
    assert a.address - b.address == 32 * MIB  # side by side, and yet:
    allocator.free(a)
    allocator.free(b)
    allocator.malloc(64 * MIB)
    assert segments_made(log) == [32 * MIB, 32 * MIB, 64 * MIB]


def test_pools_and_streams_share_nothing():
    allocator, log = make()
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(100)  # the small pool
    allocator.malloc(20 * MIB, stream=1)
    allocator.malloc(20 * MIB, owner=1)  # a private pool
    allocator.malloc(20 * MIB)
    assert segments_made(log) == [20 * MIB, 2 * MIB, 20 * MIB, 20 * MIB]


def test_a_retry_gives_back_every_cached_segment_and_not_just_enough():
    allocator, log = make(capacity=100 * MIB)
    keep = allocator.malloc(20 * MIB)
    cached = [allocator.malloc(20 * MIB) for _ in range(3)]
    small = allocator.malloc(100)
    for block in [*cached, small]:
        allocator.free(block)
    allocator.malloc(22 * MIB)  # 82 MiB are reserved
    assert sorted(segments_freed(log)) == [2 * MIB, 20 * MIB, 20 * MIB, 20 * MIB]
    assert (allocator.reserved, allocator.retries) == (42 * MIB, 1)
    assert keep.state != FREE


def test_a_live_block_of_512_bytes_pins_its_segment():
    allocator, log = make(capacity=40 * MIB)
    large = allocator.malloc(19 * MIB - 512)
    pin = allocator.malloc(MIB + 512)  # in the rest of the 20 MiB
    allocator.free(large)
    with pytest.raises(OutOfMemory, match="31,457,280") as caught:
        allocator.malloc(30 * MIB)
    assert caught.value.wanted == 30 * MIB and caught.value.reserved == 20 * MIB
    assert segments_freed(log) == []
    allocator.free(pin)
    allocator.malloc(30 * MIB)
    assert segments_freed(log) == [20 * MIB]
    assert (allocator.ooms, allocator.retries) == (1, 2)


def test_releases_of_a_failed_retry_stay():
    allocator, log = make(capacity=30 * MIB)
    allocator.free(allocator.malloc(20 * MIB))
    with pytest.raises(OutOfMemory):
        allocator.malloc(32 * MIB)
    assert allocator.reserved == 0
    assert [ACTION_NAMES[row[0]] for row in log][-2:] == ["segment_free", "oom"]


def test_a_block_that_another_stream_uses_is_neither_allocated_nor_reusable():
    allocator, log = make()
    block = allocator.malloc(20 * MIB)
    allocator.request_free(block)
    assert allocator.allocated == 0
    other = allocator.malloc(20 * MIB)
    assert other is not block and segments_made(log) == [20 * MIB, 20 * MIB]
    allocator.complete_free(block)
    assert allocator.malloc(20 * MIB).address == block.address


def test_a_retry_waits_for_blocks_that_other_streams_use():
    allocator, log = make(capacity=30 * MIB)
    allocator.request_free(allocator.malloc(20 * MIB))
    allocator.malloc(22 * MIB)
    names = [ACTION_NAMES[row[0]] for row in log]
    assert names[-4:] == ["free_completed", "segment_free", "segment_alloc", "alloc"]


def test_private_pools_go_back_only_when_nobody_uses_them():
    allocator, log = make(capacity=40 * MIB)
    allocator.free(allocator.malloc(20 * MIB, owner=3))
    with pytest.raises(OutOfMemory):
        allocator.malloc(30 * MIB)
    allocator.release_pool(3)
    allocator.malloc(30 * MIB)
    assert segments_freed(log) == [20 * MIB]


# -- expandable segments ----------------------------------------------------------------------------------------------


def test_expandable_segments_grow_by_pages_of_20_and_2_mib():
    allocator, log = make("expandable_segments:True")
    allocator.malloc(25 * MIB)  # two pages, 15 MiB free
    allocator.malloc(10 * MIB)  # from them: 5 MiB free
    allocator.malloc(30 * MIB)  # 25 MiB are missing: two pages, not ceil(30 / 20) at the end of the free tail
    allocator.malloc(100)
    assert segments_made(log) == [40 * MIB, 40 * MIB, 2 * MIB]
    assert allocator.allocated == 65 * MIB + 512
    large, _ = sorted(allocator.segments(), key=lambda segment: segment.small)
    assert large.expandable and [block.size // MIB for block in large.blocks] == [25, 10, 30, 15]


def test_expandable_segments_split_from_512_bytes_on_in_the_large_pool_too():
    allocator, _ = make("expandable_segments:True")
    assert allocator.malloc(20 * MIB - 512).size == 20 * MIB - 512
    assert allocator.reserved == 20 * MIB


def test_a_retry_unmaps_whole_pages_and_the_lowest_hole_is_filled_first():
    """Pages 0-2 hold a (10), b (40), c (10): b covers page 1 whole and halves of the others."""
    allocator, log = make("expandable_segments:True", capacity=60 * MIB)
    a, b, c = allocator.malloc(10 * MIB), allocator.malloc(40 * MIB), allocator.malloc(10 * MIB)
    base = a.address
    allocator.free(b)
    allocator.empty_cache()
    assert segments_freed(log) == [20 * MIB]
    assert [(segment.address - base, segment.size) for segment in allocator.segments()] == [
        (0, 20 * MIB),
        (40 * MIB, 20 * MIB),
    ]
    again = allocator.malloc(35 * MIB)  # the free 10 of page 0, page 1 mapped anew, 5 of the free 10 of page 2
    assert again.address == base + 10 * MIB
    assert segments_made(log) == [20 * MIB, 40 * MIB, 20 * MIB]
    assert c.address == base + 50 * MIB
    with pytest.raises(OutOfMemory):
        allocator.malloc(6 * MIB)
    assert allocator.reserved == 60 * MIB


def test_a_range_of_which_nothing_is_mapped_goes():
    allocator, _ = make("expandable_segments:True")
    allocator.free(allocator.malloc(25 * MIB))
    allocator.empty_cache()
    assert allocator.segments() == [] and allocator.reserved == 0
    assert allocator.malloc(25 * MIB).size == 25 * MIB


# -- settings ---------------------------------------------------------------------------------------------------------


def test_max_split_size_keeps_large_blocks_whole():
    allocator, log = make("max_split_size_mb:40")
    allocator.free(allocator.malloc(100 * MIB))
    allocator.malloc(30 * MIB)  # smaller than 40: it may not take a block of 40 or more
    assert segments_made(log) == [100 * MIB, 30 * MIB]
    assert allocator.malloc(81 * MIB).size == 100 * MIB  # 40 or more: up to 20 MiB larger is taken, and not split
    allocator, log = make("max_split_size_mb:40")
    allocator.free(allocator.malloc(100 * MIB))
    allocator.malloc(80 * MIB)  # 20 MiB too large
    assert segments_made(log) == [100 * MIB, 80 * MIB]


def test_max_split_size_gives_back_only_what_is_needed():
    allocator, log = make("max_split_size_mb:20", capacity=200 * MIB)
    cached = [allocator.malloc(size * MIB) for size in (60, 50, 40, 30)]
    for block in cached:
        allocator.free(block)
    allocator.malloc(84 * MIB)  # 180 reserved; none has 84, so from the largest down: 60, then 50
    assert segments_freed(log) == [60 * MIB, 50 * MIB]
    assert (allocator.reserved, allocator.retries) == (154 * MIB, 0)
    allocator, log = make("max_split_size_mb:20", capacity=200 * MIB)
    cached = [allocator.malloc(size * MIB) for size in (100, 80)]
    for block in cached:
        allocator.free(block)
    allocator.malloc(50 * MIB)  # both have 50: the smaller of them goes
    assert segments_freed(log) == [80 * MIB]


def test_garbage_collection_comes_before_the_growth_and_may_not_suffice():
    """Half of 200 MiB may be reserved, 80 % of which is the threshold. Ages at the growth: searches since each free."""
    text = "garbage_collection_threshold:0.8,per_process_memory_fraction:0.5"
    allocator, log = make(text, device_bytes=200 * MIB)
    first, second, third = (allocator.malloc(30 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.free(allocator.malloc(100))  # one search in another pool: ages count a pool's own
    allocator.malloc(31 * MIB - 1024 * KIB)  # takes `first` again
    allocator.free(second)
    allocator.free(third)
    with pytest.raises(OutOfMemory):
        allocator.malloc(80 * MIB)
    # 92 MiB > 80: both have the mean age, both go; then 32 + 80 is beyond 100 all the same
    assert segments_freed(log)[:2] == [30 * MIB, 30 * MIB]


def test_garbage_collection_spares_the_young():
    text = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5"
    allocator, log = make(text, device_bytes=400 * MIB)
    old, young = allocator.malloc(40 * MIB), allocator.malloc(60 * MIB)
    allocator.free(old)
    allocator.free(allocator.malloc(60 * MIB))  # threshold 100 MiB is not passed by 100
    allocator.free(young)
    allocator.malloc(80 * MIB)  # 160 reserved, 60 above: ages 2, 1, 1, mean 4/3: the old one, then the other two
    assert segments_freed(log) == [40 * MIB, 60 * MIB, 60 * MIB]


def test_without_a_fraction_nothing_is_collected():
    allocator, log = make("garbage_collection_threshold:0.5", capacity=200 * MIB)
    allocator.free(allocator.malloc(190 * MIB))
    allocator.malloc(8 * MIB)
    assert segments_freed(log) == []


def test_a_memory_fraction_is_a_capacity():
    allocator, _ = make("per_process_memory_fraction:0.5", device_bytes=100 * MIB)
    allocator.malloc(50 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(100)


def test_throw_on_oom_refuses_without_a_retry():
    text = "per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True"
    allocator, log = make(text, device_bytes=100 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    with pytest.raises(OutOfMemory):
        allocator.malloc(32 * MIB)
    assert (allocator.retries, segments_freed(log), allocator.reserved) == (0, [], 30 * MIB)


def test_power_of_two_rounding_decides_pool_and_segment():
    allocator, log = make("roundup_power2_divisions:4")
    assert allocator.malloc(800 * KIB).size == 896 * KIB  # steps of 128 KiB between 512 KiB and 1 MiB
    assert allocator.malloc(900 * KIB).size == MIB
    assert allocator.malloc(9 * MIB).size == 10 * MIB  # 8, 10, 12, ...: 10 MiB is a segment of its own
    assert segments_made(log) == [2 * MIB, 10 * MIB]


def test_large_segment_size_changes_segment_and_page():
    allocator, log = make("large_segment_size_mb:64")
    allocator.malloc(2 * MIB)
    allocator.malloc(12 * MIB)
    assert segments_made(log) == [64 * MIB]
    allocator, log = make("large_segment_size_mb:64,expandable_segments:True")
    allocator.malloc(65 * MIB)
    assert segments_made(log) == [128 * MIB]


# -- random histories -------------------------------------------------------------------------------------------------

SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.sampled_from([MIB - 1, MIB, MIB + 1, 2 * MIB, 10 * MIB - 513, 10 * MIB - 1, 10 * MIB, 19 * MIB, 19 * MIB + 1]),
    st.integers(MIB, 60 * MIB),
    st.builds(lambda units: units * MIB, st.integers(1, 48)),
)
EVENTS = st.lists(st.tuples(st.integers(0, 5), SIZES, st.sampled_from([0, 0, 0, 7])), min_size=1, max_size=80)


@pytest.mark.parametrize("text", ["", "expandable_segments:True", "max_split_size_mb:24"])
@settings(max_examples=150, derandomize=True, deadline=None)
@given(events=EVENTS, capacity=st.sampled_from([None, 64 * MIB, 150 * MIB, 300 * MIB]))
def test_random_histories_equal_the_naive_allocator(text, events, capacity):
    """Every address, what is reserved after every event, retries and failures. Kinds 0 and 1 free, 5 empties."""
    ours, _ = make(text, capacity)
    naive = NaiveAllocator(
        InventedAddresses(capacity=capacity),
        expandable="expandable" in text,
        max_split=24 * MIB if "max_split" in text else None,
    )
    live = {}
    for number, (kind, size, stream) in enumerate(events):
        if kind <= 1 and live:
            victim = sorted(live)[size % len(live)]
            ours.free(live.pop(victim))
            naive.free(victim)
        elif kind == 5 and size % 4 == 0:
            ours.empty_cache()
            naive.release_all()
        else:
            expected = naive.malloc(number, size, stream)
            try:
                live[number] = ours.malloc(size, stream)
            except OutOfMemory:
                assert expected is None
            else:
                assert live[number].address == expected
        assert ours.reserved == naive.reserved()
        assert ours.retries == naive.retries
    assert ours.allocated == sum(
        size for segment in naive.segments for size, what in segment.pieces if isinstance(what, int)
    )
    for segment in ours.segments():
        assert sum(block.size for block in segment.blocks) == segment.size
