"""The state of a device before the first event of a trace, from its segments at the end: the trace walked backwards.

A recording that starts with the process unwinds to nothing. One that starts later (or whose oldest events were dropped)
unwinds to the segments and blocks that were there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from metapeak.tracer.device.allocator_config import SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorConfig
from metapeak.tracer.device.blocks import (
    ALLOC,
    ALLOCATED,
    FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    PENDING,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    BlockView,
    SegmentView,
)
from metapeak.tracer.device.snapshot_reader import DeviceHistory, Entry
from metapeak.tracer.errors import InputError

_NEAR_BYTES = 64 << 30
_GRANULE = SMALL_SEGMENT_BYTES  # pages are multiples of it


@dataclass(frozen=True, order=True, slots=True)
class PoolKey:
    """Which pool a segment belongs to."""

    owner: int
    small: bool
    stream: int


@dataclass(slots=True)
class _Live:
    """A block on the way back. `size` is None where no segment table says it; it is at least the rounded request."""

    requested: int
    size: int | None
    state: int
    freed_at: int


@dataclass(frozen=True, kw_only=True, eq=False)
class StartState:
    """What was there before the first event: whole segments, and the mapped runs of each pool's expandable range."""

    segments: list[SegmentView]
    runs: dict[PoolKey, list[SegmentView]]
    range_bases: dict[PoolKey, int]

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in [*self.segments, *(run for runs in self.runs.values() for run in runs)])


def start_state(history: DeviceHistory, config: AllocatorConfig) -> StartState:
    """The state before the first event of `history`. Raises InputError when its events contradict its segments."""
    classes = _ExpandableClasses(history, config)
    segments: dict[int, tuple[int, PoolKey]] = {}
    granules: dict[int, PoolKey] = {}
    live: dict[int, _Live] = {}
    for segment in history.segments:
        key = PoolKey(segment.owner, segment.small, segment.stream)
        if segment.expandable:
            granules.update(dict.fromkeys(_granules(segment.address, segment.size), key))
        else:
            segments[segment.address] = (segment.size, key)
        for block in segment.blocks:
            if block.state != FREE:
                live[block.address] = _Live(block.requested, block.size, block.state, len(history.entries))
    for index in range(len(history.entries) - 1, -1, -1):
        _undo(history, index, segments, granules, live, classes)
    return _built(history, config, segments, granules, live, classes)


def _undo(history, index, segments, granules, live, classes) -> None:
    entry: Entry = history.entries[index]
    action, address = entry.action, entry.address
    if action == ALLOC:
        if live.pop(address, None) is None:
            raise _contradiction(history, index, "allocates a block that is not there afterwards")
    elif action == FREE_COMPLETED:
        if address in live:
            raise _contradiction(history, index, "frees a block that is there afterwards")
        live[address] = _Live(entry.size, None, PENDING, index)
    elif action == FREE_REQUESTED:
        if address not in live:
            raise _contradiction(history, index, "asks to free a block that is not there afterwards")
        live[address].state = ALLOCATED
    elif action == SEGMENT_ALLOC:
        if segments.pop(address, (None,))[0] != entry.size:
            raise _contradiction(history, index, "makes a segment that is not there afterwards")
    elif action == SEGMENT_FREE:
        if address in segments:
            raise _contradiction(history, index, "releases a segment that is there afterwards")
        small = entry.size == SMALL_SEGMENT_BYTES
        segments[address] = (entry.size, PoolKey(entry.owner or 0, small, entry.stream))
    elif action == SEGMENT_MAP:
        for granule in _granules(address, entry.size):
            if granules.pop(granule, None) is None:
                raise _contradiction(history, index, "maps pages that are not there afterwards")
    elif action == SEGMENT_UNMAP:
        key = classes.of(entry)
        granules.update(dict.fromkeys(_granules(address, entry.size), key))


def _granules(address: int, size: int) -> range:
    return range(address, address + size, _GRANULE)


def _contradiction(history: DeviceHistory, index: int, what: str) -> InputError:
    entry = history.entries[index]
    return InputError(
        f"The snapshot contradicts itself: event {index} of device {history.device} ({entry.size:,} bytes at "
        f"{entry.address:#x}) {what}. Recording has to be on until the snapshot is taken."
    )


class _ExpandableClasses:
    """To which pool the pages of an unmapping belong, which its event does not say.

    What is no whole number of the large pool's pages is of the small one. Else, since ranges are reserved wider than
    the device's memory, a page whose pool is known and that is near is of the same range.
    """

    def __init__(self, history: DeviceHistory, config: AllocatorConfig):
        self._large_page = config.page_bytes(small=False)
        known = {}
        for segment in history.segments:
            if segment.expandable:
                known[segment.address] = PoolKey(segment.owner, segment.small, segment.stream)
        for entry in history.entries:
            if entry.action == SEGMENT_MAP:
                # A map of the small pool is one page of 2 MiB: its requests are smaller than that.
                small = entry.size == SMALL_SEGMENT_BYTES
                known.setdefault(entry.address, PoolKey(entry.owner or 0, small, entry.stream))
        self._known = dict(sorted(known.items()))
        self._addresses = list(self._known)
        self.lowest: dict[PoolKey, int] = {}
        for address, key in self._known.items():
            self.lowest.setdefault(key, address)

    def of(self, entry: Entry) -> PoolKey:
        index = bisect_left(self._addresses, entry.address)
        near = self._addresses[max(index - 1, 0) : index + 1]
        near = [
            address
            for address in near
            if self._known[address].stream == entry.stream and abs(address - entry.address) < _NEAR_BYTES
        ]
        if entry.size % self._large_page:
            key = PoolKey(entry.owner or 0, True, entry.stream)
        elif near:
            key = self._known[min(near, key=lambda address: abs(address - entry.address))]
        else:
            key = PoolKey(entry.owner or 0, False, entry.stream)
        self.lowest[key] = min(self.lowest.get(key, entry.address), entry.address)
        return key


def _built(history, config, segments, granules, live, classes) -> StartState:
    wholes = [(address, size, key, False) for address, (size, key) in segments.items()]
    runs = _runs(granules)
    ordered = sorted(live.items())
    addresses = [address for address, _ in ordered]
    allocations = _Allocations(history.entries)
    views = []
    used = 0
    for address, size, key, expandable in sorted([*wholes, *runs]):
        inside = ordered[bisect_left(addresses, address) : bisect_left(addresses, address + size)]
        used += len(inside)
        blocks = _tiled(address, size, key, inside, config, allocations, history, expandable)
        views.append(SegmentView(address, size, key.stream, key.small, key.owner, expandable, tuple(blocks)))
    if used != len(ordered):
        raise InputError(
            f"The snapshot contradicts itself: device {history.device} has {len(ordered) - used} blocks outside every "
            "segment. Recording has to be on until the snapshot is taken."
        )
    by_pool: dict[PoolKey, list[SegmentView]] = {}
    for view in views:
        if view.expandable:
            by_pool.setdefault(PoolKey(view.owner, view.small, view.stream), []).append(view)
    bases = {key: min(found[0].address, classes.lowest.get(key, found[0].address)) for key, found in by_pool.items()}
    return StartState(segments=[view for view in views if not view.expandable], runs=by_pool, range_bases=bases)


def _runs(granules: dict[int, PoolKey]) -> list[tuple[int, int, PoolKey, bool]]:
    runs: list[tuple[int, int, PoolKey, bool]] = []
    for address in sorted(granules):
        key = granules[address]
        if runs and runs[-1][0] + runs[-1][1] == address and runs[-1][2] == key:
            begin, size, _, _ = runs[-1]
            runs[-1] = (begin, size + _GRANULE, key, True)
        else:
            runs.append((address, _GRANULE, key, True))
    return runs


class _Allocations:
    """Where and when the trace allocates, by address."""

    def __init__(self, entries: Iterable[Entry]):
        found = sorted((entry.address, index) for index, entry in enumerate(entries) if entry.action == ALLOC)
        self._addresses = [address for address, _ in found]
        self._indices = [index for _, index in found]

    def first_between(self, low: int, high: int, before: int) -> int | None:
        """The lowest address in low..high (both included) that is allocated before event `before`."""
        at = bisect_left(self._addresses, low)
        while at < len(self._addresses) and self._addresses[at] <= high:
            if self._indices[at] < before:
                return self._addresses[at]
            at += 1
        return None


def _tiled(
    address: int,
    size: int,
    key: PoolKey,
    live: Sequence[tuple[int, _Live]],
    config: AllocatorConfig,
    allocations: _Allocations,
    history: DeviceHistory,
    expandable: bool,
) -> list[BlockView]:
    """The blocks of a segment: the live ones, and free ones in the gaps."""
    blocks, position, end = [], address, address + size
    for number, (begin, block) in enumerate(live):
        limit = live[number + 1][0] if number + 1 < len(live) else end
        if begin < position:
            raise _overlap(history, begin)
        if begin > position:
            blocks.append(BlockView(position, begin - position, 0, FREE))
        nbytes = block.size
        if nbytes is None:
            nbytes = _block_size(begin, block, limit, key, config, allocations, expandable)
        if begin + nbytes > limit:
            raise _overlap(history, begin)
        blocks.append(BlockView(begin, nbytes, block.requested, block.state))
        position = begin + nbytes
    if position < end:
        blocks.append(BlockView(position, end - position, 0, FREE))
    return blocks


def _overlap(history: DeviceHistory, address: int) -> InputError:
    return InputError(
        f"The snapshot contradicts itself: before the first event of device {history.device}, the block at "
        f"{address:#x} overlaps another or leaves its segment."
    )


def _block_size(
    begin: int, block: _Live, limit: int, key: PoolKey, config: AllocatorConfig, allocations: _Allocations, expandable
) -> int:
    """The size of a block of which only the request is known, and that it ends before `limit`.

    In the small pool and in expandable segments everything beyond the rounded request was split off. In the large pool
    up to 1 MiB stays with the block, and no free block is that small: a gap up to 1 MiB is the block's own. Of a larger
    gap some may be, when the block after it was there at the time and is gone; then the lowest address that is handed
    out there while the block lives shows where it ends.
    """
    rounded = config.round_size(block.requested)
    gap = limit - begin - rounded
    if key.small or expandable or gap <= 0:
        return rounded
    never_split = config.max_split_bytes is not None and rounded >= config.max_split_bytes
    if gap <= SMALL_BYTES or never_split:
        return rounded + gap
    low = begin + rounded
    first = allocations.first_between(low, low + SMALL_BYTES, block.freed_at)
    return rounded if first is None else first - begin
