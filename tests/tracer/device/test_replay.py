"""Recorded histories replayed: those of real GPUs in snapshots/, and made ones for what no real one here exercises.

The real ones have no retry, no release and one stream; made ones have all of that, and every way to start in the
middle. Their placement rules are our own, so they test the unwinding and the comparison; the rules are tested by the
real ones and by the naive allocator.
"""

import contextlib
import os
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metapeak.tracer.device.address_space import InventedAddresses
from metapeak.tracer.device.allocator import CachingAllocator, OutOfMemory
from metapeak.tracer.device.allocator_config import DEFAULT_CONFIG, parse_allocator_config
from metapeak.tracer.device.blocks import ALLOC, SEGMENT_ALLOC
from metapeak.tracer.device.replay import replay
from metapeak.tracer.device.snapshot_reader import read_snapshot, snapshot_of
from metapeak.tracer.errors import InputError
from tests.tracer.device.recording import snapshot_dict
from tests.tracer.device.test_allocator import EVENTS

MIB = 1 << 20
FOLDER = Path(__file__).parent / "snapshots"
SMALL = ["003", "017", "020", "035", "039", "042", "053", "055", "080", "085", "087"]


def rows():
    """The table of snapshots/README.md: file -> its cells."""
    table = {}
    for line in (FOLDER / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 10 and cells[1].startswith("snapshot-"):
            table[cells[1]] = cells
    return table


def check_real(path, row=None):
    """A tuple a history after checking that its replay is exact: growths recorded, matched blind, false blind, whether
    the blind peak is right, blocks at the recorded address.
    """
    snapshot = read_snapshot(path)
    totals = []
    for history in snapshot.recorded:
        result = replay(history, snapshot.config)
        assert result.exact, (path, history.device, result)
        if row is not None:
            counts = (len(history.entries), result.requests, result.growths.recorded, result.releases.recorded)
            assert counts == tuple(int(cell) for cell in row[4:8])
            assert result.starts_empty == (row[3] == "start")
            assert result.peak_reserved_replayed == int(row[8]) * MIB
            assert round(result.peak_allocated_replayed / MIB) == int(row[9])
        blind = replay(history, snapshot.config, blind=True)
        peak_right = blind.peak_reserved_recorded == blind.peak_reserved_replayed
        growths, addresses = blind.growths, result.addresses
        assert addresses.matched == addresses.recorded and result.growths.matched == growths.recorded
        totals.append((growths.recorded, growths.matched, growths.false, peak_right, addresses.recorded))
    return totals


@pytest.mark.parametrize("number", SMALL)
def test_real_histories_replay_exactly(number):
    name = f"snapshot-{number}.pickle.xz"
    check_real(FOLDER / name, rows()[name])


@pytest.mark.slow
def test_every_real_history_and_blind_ones():
    """All that are shipped, or all in the folder that METAPEAK_SNAPSHOTS names."""
    folder = Path(os.environ.get("METAPEAK_SNAPSHOTS", FOLDER))
    table = rows() if folder == FOLDER else {}
    totals = [total for path in sorted(folder.glob("*.pickle*")) for total in check_real(path, table.get(path.name))]
    recorded, matched, false, peaks, addresses = (sum(column) for column in zip(*totals))
    blind = f"{matched} of {recorded} growths, {false} false, {peaks} peaks"
    print(f"{len(totals)} traces, {addresses} blocks; blind: {blind}")
    if folder == FOLDER:  # what README says of the shipped ones
        assert (len(totals), recorded, addresses) == (53, 3067, 157_754)
        assert (matched, false, peaks) == (3065, 2, 53)
    else:
        assert matched >= 0.999 * recorded
        assert peaks >= 0.98 * len(totals)


def record(events, text="", capacity=None, start=0, last=None, delayed=False):
    """A snapshot of random events through our allocator: kinds 0 and 1 free, 5 empties the cache, else a request.

    Recording starts before event `start`; of what is recorded, the `last` entries are kept.
    """
    log = []
    allocator = CachingAllocator(parse_allocator_config(text), InventedAddresses(capacity=capacity), log=log)
    live, pending = {}, []
    for number, (kind, size, stream) in enumerate(events):
        if number == start:
            log.clear()
        while pending and size % 3:
            block = pending.pop(0)
            if block.address in allocator._pending:  # else a retry had waited for it
                allocator.complete_free(block)
        if kind <= 1 and live:
            block = live.pop(sorted(live)[size % len(live)])
            if delayed and size % 2:
                allocator.request_free(block)
                pending.append(block)
            else:
                allocator.free(block)
        elif kind == 5 and size % 4 == 0:
            allocator.empty_cache()
        else:
            with contextlib.suppress(OutOfMemory):
                live[number] = allocator.malloc(size, stream)
    raw = snapshot_dict((allocator, log), settings={"PYTORCH_CUDA_ALLOC_CONF": text}, last=last)
    return snapshot_of(pickle.loads(pickle.dumps(raw))), allocator, log


RANDOM = settings(max_examples=100, derandomize=True, deadline=None)
CAPACITIES = st.sampled_from([None, 64 * MIB, 150 * MIB, 300 * MIB])


@pytest.mark.parametrize("text", ["", "expandable_segments:True", "max_split_size_mb:24"])
@RANDOM
@given(events=EVENTS, capacity=CAPACITIES, delayed=st.booleans())
def test_a_made_recording_from_the_start_replays_exactly(text, events, capacity, delayed):
    """Not with delayed frees and max_split_size: a retry may wait for them between two releases, as no other does."""
    snapshot, allocator, _ = record(events, text, capacity, delayed=delayed and "max_split" not in text)
    for history in snapshot.recorded:
        result = replay(history, snapshot.config)
        assert result.exact, result
        assert result.starts_empty
        assert result.peak_allocated_replayed == allocator.allocated_peak
        assert result.peak_reserved_replayed == allocator.reserved_peak
        assert result.retries.ooms_recorded == allocator.ooms


@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
@RANDOM
@given(events=EVENTS, capacity=CAPACITIES, delayed=st.booleans(), start=st.integers(1, 79))
def test_a_made_recording_that_starts_in_the_middle_replays_exactly(text, events, capacity, delayed, start):
    snapshot, _, _ = record(events, text, capacity, start=min(start, len(events) - 1), delayed=delayed)
    for history in snapshot.recorded:
        result = replay(history, snapshot.config)
        assert result.exact, result


@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
@RANDOM
@given(events=EVENTS, capacity=CAPACITIES, last=st.integers(1, 120))
def test_a_ring_buffer_may_cut_a_request_in_two(text, events, capacity, last):
    """What is left of its entries can contradict nothing; all requests after it are compared."""
    snapshot, _, _ = record(events, text, capacity, last=last)
    for history in snapshot.recorded:
        result = replay(history, snapshot.config)
        assert result.addresses.recorded == result.requests >= result.addresses.matched


def test_retries_are_predicted_from_a_capacity_alone():
    """84 MiB, each request alone: 30 and 32 stay cached, 34 does not fit beside them (62 + 34), nor 38 beside 34 and
    36, 42 beside 38 and 40, 44 beside 42, 60 beside 44; and 40 does not fit beside the live 60 at all.
    """
    log = []
    allocator = CachingAllocator(DEFAULT_CONFIG, InventedAddresses(capacity=84 * MIB), log=log)
    for size in (30, 32, 34, 36, 38, 40, 42, 44):
        allocator.free(allocator.malloc(size * MIB))
    allocator.malloc(60 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(40 * MIB)
    (history,) = snapshot_of(snapshot_dict((allocator, log))).recorded
    result = replay(history, DEFAULT_CONFIG)
    assert result.exact
    retries = result.retries
    assert allocator.retries == 6
    assert retries.capacity == 78 * MIB  # 38 + 40, the most that was reserved
    assert (retries.recorded, retries.predicted, retries.matched) == (6, 6, 6)
    assert (retries.ooms_recorded, retries.ooms_matched, retries.unexplained) == (1, 1, 0)
    assert result.releases.recorded == result.releases.matched == 8


def test_a_call_of_empty_cache_before_a_growth_is_no_retry():
    """110 MiB reserved of which 20 go; then 30 more would have fitted beside them, since later 220 are reserved."""
    log = []
    allocator = CachingAllocator(DEFAULT_CONFIG, InventedAddresses(), log=log)
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(90 * MIB)
    allocator.empty_cache()
    allocator.malloc(30 * MIB)
    allocator.malloc(100 * MIB)
    (history,) = snapshot_of(snapshot_dict((allocator, log))).recorded
    result = replay(history, DEFAULT_CONFIG)
    assert result.exact
    assert (result.retries.recorded, result.retries.predicted, result.retries.unexplained) == (0, 0, 1)


def test_wrong_rules_are_seen():
    """Recorded with one setting, replayed with another: only addresses show that 2.5 MiB were rounded to 3."""
    log = []
    allocator = CachingAllocator(DEFAULT_CONFIG, InventedAddresses(), log=log)
    allocator.free(allocator.malloc(12 * MIB))
    for _ in range(3):
        allocator.malloc(5 * MIB // 2)
    (history,) = snapshot_of(snapshot_dict((allocator, log))).recorded
    assert replay(history, DEFAULT_CONFIG).exact
    other = replay(history, parse_allocator_config("roundup_power2_divisions:2"))
    assert (other.growths.matched, other.growths.false) == (1, 0)
    assert (other.addresses.recorded, other.addresses.matched) == (4, 2)
    assert other.peak_reserved_replayed == other.peak_reserved_recorded and not other.exact
    paged = replay(history, parse_allocator_config("expandable_segments:True"))
    assert (paged.growths.matched, paged.growths.false) == (0, 1)
    assert paged.peak_reserved_replayed == 20 * MIB


def test_a_block_of_unknown_size_ends_where_the_next_one_begins():
    """Live at the start: 19 MiB in 20, whose last MiB was not split off. The trace frees it and takes 20 there."""
    log = []
    allocator = CachingAllocator(DEFAULT_CONFIG, InventedAddresses(), log=log)
    block = allocator.malloc(19 * MIB)
    log.clear()
    allocator.free(block)
    allocator.malloc(20 * MIB)
    (history,) = snapshot_of(snapshot_dict((allocator, log))).recorded
    result = replay(history, DEFAULT_CONFIG)
    assert result.exact and not result.starts_empty
    assert result.peak_allocated_replayed == 20 * MIB


def test_the_lowest_address_that_is_handed_out_shows_where_a_block_ends():
    """a (19 MiB + 512) got 20 of 40 unsplit before b; b is gone at the start, so a might end at 19 MiB + 512 or 20."""
    log = []
    allocator = CachingAllocator(DEFAULT_CONFIG, InventedAddresses(), log=log)
    whole = allocator.malloc(40 * MIB)
    allocator.free(whole)
    first, second = allocator.malloc(20 * MIB), allocator.malloc(20 * MIB)
    allocator.free(first)
    a = allocator.malloc(19 * MIB + 512)
    assert a.size == 20 * MIB
    allocator.free(second)
    log.clear()
    allocator.malloc(2 * MIB)
    allocator.free(a)
    (history,) = snapshot_of(snapshot_dict((allocator, log))).recorded
    assert replay(history, DEFAULT_CONFIG).exact


def test_contradictions_are_refused():
    log = []
    allocator = CachingAllocator(DEFAULT_CONFIG, InventedAddresses(), log=log)
    allocator.malloc(20 * MIB)
    good = snapshot_dict((allocator, log))
    for change, words in [
        (lambda raw: raw["segments"].clear(), "is not there afterwards"),
        (lambda raw: raw["device_traces"][0].append(raw["device_traces"][0][-1]), "is not there afterwards"),
        (lambda raw: raw["segments"][0]["blocks"][0].update(address=0) or raw["segments"][0].update(address=0), "not"),
        (lambda raw: raw["segments"][0]["blocks"][0].update(state="inactive"), "is not there afterwards"),
    ]:
        raw = pickle.loads(pickle.dumps(good))
        change(raw)
        (history,) = snapshot_of(raw).recorded
        with pytest.raises(InputError, match=words) as caught:
            replay(history, DEFAULT_CONFIG)
        assert "contradicts itself" in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_devices_are_replayed_apart():
    pairs = []
    for size in (20, 30):
        log = []
        allocator = CachingAllocator(DEFAULT_CONFIG, InventedAddresses(), log=log)
        allocator.malloc(size * MIB)
        pairs.append((allocator, log))
    snapshot = snapshot_of(snapshot_dict(*pairs))
    peaks = [replay(history, snapshot.config).peak_reserved_replayed for history in snapshot.recorded]
    assert peaks == [20 * MIB, 30 * MIB]


def test_readme_of_the_snapshots_names_every_one():
    shipped = {path.name for path in FOLDER.glob("*.xz")}
    assert shipped == set(rows())
    assert all(re.search(r"[0-9a-f]{12}", cells[-2]) for cells in rows().values())
    assert {f"snapshot-{number}.pickle.xz" for number in SMALL} <= shipped
    assert ALLOC == 0 and SEGMENT_ALLOC == 3
