"""PyTorch's CUDA caching allocator, native backend, as integers: which block a request gets and when memory grows.

The rules, each with its name in c10/cuda/CUDACachingAllocator.cpp:

* A request is rounded (`round_size`) and goes to the pool of its stream: small up to 1 MiB, else large. Pools share
  nothing (`get_pool`).
* It takes the smallest free block that is large enough, of equal ones that at the lowest address (`get_free_block`). An
  expandable block counts with the unmapped room right after it.
* What a block has beyond the request is split off its high end: in the small pool and with expandable segments from 512
  bytes on, in the large pool when it is more than 1 MiB (`should_split`). A block that is not split is counted whole.
* Without a block the pool grows by a segment (`get_allocation_size`), or by pages of an expandable one
  (`try_allocate_expandable_block`). When the driver has no memory left, cached blocks go back to it and it is asked
  again (`release_available_cached_blocks`, `release_cached_blocks`).
* A freed block merges at once with free neighbours in its segment (`try_merge_blocks`).

Not modelled: memory pools that opted in with `use_on_oom` or `no_split`, graph capture (which skips the retry), and the
growth of a failed retry that a second call would not need (a block whose free was pending on another stream).

Sources: the file named above at torch 2.6 and about 2.12, c10/core/AllocatorConfig.h of 2.13; checked against recorded
histories of real GPUs (tests/tracer/device/test_replay.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from metapeak.tracer.device.address_space import RANGE_SPAN, Driver
from metapeak.tracer.device.allocator_config import MIN_BLOCK_BYTES, SMALL_BYTES, AllocatorConfig
from metapeak.tracer.device.blocks import (
    ALLOC,
    ALLOCATED,
    FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    PENDING,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    UNMAPPED,
    Block,
    ExpandableRange,
    Pool,
    SegmentView,
    view_of,
)
from metapeak.tracer.errors import MetapeakError


class OutOfMemory(MetapeakError):
    """The driver has no memory left for a request, also after all cached segments went back to it.

    Attributes: `requested` and `reserved` bytes, and `wanted`, the bytes of the segment that the driver refused.
    """

    def __init__(self, requested: int, reserved: int, wanted: int):
        super().__init__(
            f"Out of memory: a request of {requested:,} bytes needs a segment of {wanted:,}; {reserved:,} are reserved."
        )
        self.requested, self.reserved, self.wanted = requested, reserved, wanted


class CachingAllocator:
    """The allocator of one device.

    `device_bytes` is the card's total memory, for settings that take a fraction of it. With `log` a list, every event
    is appended to it as (action, address, size, stream), in the order and with the sizes of a snapshot's trace.
    """

    def __init__(
        self, config: AllocatorConfig, driver: Driver, *, device_bytes: int | None = None, log: list | None = None
    ):
        self.config, self.driver, self.log = config, driver, log
        self.allocated = self.requested = self.reserved = 0
        self.allocated_peak = self.requested_peak = self.reserved_peak = 0
        self.retries = self.ooms = 0
        self._pools: dict[tuple[int, bool, int], Pool] = {}
        self._heads: dict[int, Block] = {}  # first block of every segment and range
        self._freeable: dict[int, None] = {}  # private pools that nobody uses any more
        self._pending: dict[int, Block] = {}
        self._rounds_simply = not any(divisions > 1 for divisions in config.power2_divisions)
        self._device_bytes = device_bytes
        self._allowed = None
        if config.memory_fraction < 1 and device_bytes is not None:
            self._allowed = config.allowed_bytes(device_bytes)
        self._collects = config.garbage_collection_threshold > 0 and self._allowed is not None
        self._searches: dict[tuple[int, bool], list[int]] = {}

    # -- what a program does ------------------------------------------------------------------------------------------

    def malloc(self, nbytes: int, stream: int = 0, owner: int = 0) -> Block:
        """The block for a request of `nbytes` (1 or more). Raises OutOfMemory."""
        if self._rounds_simply:
            rounded = (nbytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES
        else:
            rounded = self.config.round_size(nbytes)
        small = rounded <= SMALL_BYTES
        pool = self._pools.get((owner, small, stream)) or self._pool(owner, small, stream)
        block = self._search(pool, rounded) or self._grow(pool, rounded, nbytes)
        remaining = block.size - rounded
        if remaining and self._splits(pool, rounded, remaining):
            pool.insert(block.split_off(rounded, FREE))
        block.state, block.requested = ALLOCATED, nbytes
        self.requested += nbytes
        self.allocated += block.size
        if self.allocated > self.allocated_peak:
            self.allocated_peak = self.allocated
        if self.requested > self.requested_peak:
            self.requested_peak = self.requested
        if self.log is not None:
            self.log.append((ALLOC, block.address, nbytes, stream))
        return block

    def free(self, block: Block) -> None:
        """Give a block back at once."""
        pool = block.pool
        self.allocated -= block.size
        self.requested -= block.requested
        if self.log is not None:
            stream = pool.stream
            self.log.append((FREE_REQUESTED, block.address, block.requested, stream))
            self.log.append((FREE_COMPLETED, block.address, block.requested, stream))
        pool.insert(pool.merged(block, FREE))

    def request_free(self, block: Block) -> None:
        """The program frees a block that other streams still use: not allocated any more, and not reusable yet."""
        block.state = PENDING
        self.allocated -= block.size
        self._pending[block.address] = block
        if self.log is not None:
            self.log.append((FREE_REQUESTED, block.address, block.requested, block.pool.stream))

    def complete_free(self, block: Block) -> None:
        """The last stream is done with a block whose free was requested: it merges and can be reused."""
        del self._pending[block.address]
        self.requested -= block.requested
        if self.log is not None:
            self.log.append((FREE_COMPLETED, block.address, block.requested, block.pool.stream))
        pool = block.pool
        pool.insert(pool.merged(block, FREE))

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache(): every segment without a live block goes back to the driver."""
        self._release_cached_blocks()

    def release_pool(self, owner: int) -> None:
        """A private pool that nothing uses any more: its segments can go back when memory is short."""
        self._freeable[owner] = None

    def fits(self, nbytes: int, stream: int = 0, owner: int = 0) -> bool:
        """Whether a request would be served from cached blocks."""
        rounded = self.config.round_size(nbytes)
        return self._find(self._pool(owner, rounded <= SMALL_BYTES, stream), rounded) is not None

    def segments(self) -> list[SegmentView]:
        """Every segment with its blocks, by address."""
        found = []
        for head in self._heads.values():
            run: list[Block] = []
            block: Block | None = head
            while block is not None:
                if block.state != UNMAPPED:
                    run.append(block)
                if run and (block.state == UNMAPPED or block.right is None):
                    found.append(view_of(run))
                    run = []
                block = block.right
        return sorted(found, key=lambda segment: segment.address)

    def adopt(self, segments: Sequence[SegmentView], range_: ExpandableRange | None = None) -> dict[int, Block]:
        """Take over memory that exists already, in the state of its views; returns its live blocks by address.

        `segments` is one segment, or with `range_` the mapped runs of that expandable range in order of address.
        """
        pool = self._pool(segments[0].owner, segments[0].small, segments[0].stream)
        chain: list[Block] = []
        position = range_.base if range_ is not None else segments[0].address
        for segment in segments:
            if segment.address > position:
                chain.append(Block(position, segment.address - position, pool, UNMAPPED, range_))
            for view in segment.blocks:
                chain.append(Block(view.address, view.size, pool, view.state, range_))
                chain[-1].requested = view.requested
            position = segment.address + segment.size
            self._add_reserved(segment.size)
        if range_ is not None:
            end = range_.base + self._range_span(range_.page)
            chain.append(Block(position, max(end - position, range_.page), pool, UNMAPPED, range_))
        self._heads[chain[0].address] = chain[0]
        for left, right in itertools.pairwise(chain):
            left.right, right.left = right, left
        for block in chain:
            self._adopt_block(block)
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        self.requested_peak = max(self.requested_peak, self.requested)
        return {block.address: block for block in chain if block.state < FREE}

    def _adopt_block(self, block: Block) -> None:
        if block.state >= FREE:
            block.pool.insert(block)
            return
        self.requested += block.requested
        if block.state == PENDING:
            self._pending[block.address] = block
        else:
            self.allocated += block.size

    # -- pools and blocks ---------------------------------------------------------------------------------------------

    def _pool(self, owner: int, small: bool, stream: int) -> Pool:
        key = (owner, small, stream)
        if key not in self._pools:
            self._pools[key] = Pool(owner, small, stream, self._searches.setdefault((owner, small), [0]))
        return self._pools[key]

    def _splits(self, pool: Pool, rounded: int, remaining: int) -> bool:
        if pool.small or self.config.expandable_segments:
            return remaining >= MIN_BLOCK_BYTES
        limit = self.config.max_split_bytes
        return remaining > SMALL_BYTES and (limit is None or rounded < limit)

    # -- search -------------------------------------------------------------------------------------------------------

    def _search(self, pool: Pool, rounded: int) -> Block | None:
        """The free block that the request gets, out of its pool's list, or None."""
        pool.searches[0] += 1
        found = self._find(pool, rounded)
        return None if found is None else pool.pop(found)

    def _find(self, pool: Pool, rounded: int) -> int | None:
        """Index into the pool's free blocks of the one that fits best, or None."""
        index = pool.first_of(rounded)
        if index == len(pool.free):
            return None
        block = pool.at(index)
        if block.range is not None:
            index = self._find_expandable(pool, index)
            if index is None:
                return None
            block = pool.at(index)
        limit = self.config.max_split_bytes
        if limit is not None:
            if rounded < limit <= block.size:
                return None
            if rounded >= limit and block.size >= rounded + self.config.max_non_split_rounding_bytes:
                return None
        return index

    def _find_expandable(self, pool: Pool, index: int) -> int | None:
        """Where the search ends that met an expandable block at `index`."""
        last = len(pool.free) - 1
        block = pool.at(index)
        if not self.config.expandable_segments:  # switched off since: such blocks are skipped
            while block.range is not None:
                if index == last:
                    return None
                index += 1
                block = pool.at(index)
            return index
        while block.range is not None and index < last:
            following = pool.at(index + 1)
            if _reach(following) >= _reach(block):
                break
            index, block = index + 1, following
        return index

    # -- growth -------------------------------------------------------------------------------------------------------

    def _grow(self, pool: Pool, rounded: int, nbytes: int) -> Block:
        """A block from the driver, with cached memory given back where it has none left. Raises OutOfMemory."""
        wanted = self.config.segment_bytes(rounded)
        if self._collects:
            self._collect_garbage()
        refused_early = self.config.throw_on_oom and self._beyond_fraction(wanted)
        if not refused_early:
            block = self._allocate(pool, rounded, wanted)
            if block is None and self._release_available(pool, rounded):
                block = self._allocate(pool, rounded, wanted)
            if block is None:
                self._release_cached_blocks()
                self.retries += 1
                block = self._allocate(pool, rounded, wanted)
            if block is not None:
                return block
        self.ooms += 1
        if self.log is not None:
            self.log.append((OOM, 0, rounded, pool.stream))
        raise OutOfMemory(nbytes, self.reserved, wanted)

    def _beyond_fraction(self, wanted: int) -> bool:
        return self._allowed is not None and self.reserved + wanted > self._allowed

    def _allocate(self, pool: Pool, rounded: int, wanted: int) -> Block | None:
        if self._beyond_fraction(wanted):
            return None
        if self.config.expandable_segments:
            return self._allocate_expandable(pool, rounded)
        address = self.driver.allocate(wanted)
        if address is None:
            return None
        block = Block(address, wanted, pool, ALLOCATED)
        self._heads[address] = block
        self._add_reserved(wanted)
        if self.log is not None:
            self.log.append((SEGMENT_ALLOC, address, wanted, pool.stream))
        return block

    def _add_reserved(self, nbytes: int) -> None:
        self.reserved += nbytes
        if self.reserved > self.reserved_peak:
            self.reserved_peak = self.reserved

    # -- expandable segments ------------------------------------------------------------------------------------------

    def _allocate_expandable(self, pool: Pool, rounded: int) -> Block | None:
        """A free block of `rounded` bytes or more in an expandable range, pages mapped where it has none."""
        block = self._room(pool, rounded)
        if block.state == UNMAPPED:
            block = self._map(block, min(block.size, rounded))
            if block is None:
                return None
        while block.size < rounded:
            room = block.right
            assert room is not None and room.state == UNMAPPED
            block = self._map(room, min(rounded - block.size, room.size))
            if block is None:
                return None
        pool.take(block)
        return block

    def _room(self, pool: Pool, rounded: int) -> Block:
        """Where consecutive free and unmapped blocks reach `rounded` bytes, lowest address first; else a new range."""
        for address in pool.unmapped:
            start = pool.blocks[address]
            if start.left is not None and start.left.state >= FREE:
                start = start.left
            reached, block = 0, start
            while block is not None and block.state >= FREE and reached < rounded:
                reached += block.size
                block = block.right
            if reached >= rounded:
                return start
        page = self.config.page_bytes(small=pool.small)
        range_ = ExpandableRange(base=self.driver.reserve_range(), page=page)
        block = Block(range_.base, self._range_span(page), pool, UNMAPPED, range_)
        self._heads[block.address] = block
        pool.insert(block)
        return block

    def _map(self, block: Block, nbytes: int) -> Block | None:
        """The free block around `nbytes` newly mapped at the low end of an unmapped one, or None: out of memory."""
        mapped = -(-nbytes // block.range.page) * block.range.page
        if not self.driver.map(block.address, mapped):
            return None
        if self.log is not None:
            self.log.append((SEGMENT_MAP, block.address, mapped, block.pool.stream))
        pool = block.pool
        pool.take(block)
        if mapped < block.size:
            pool.insert(block.split_off(mapped, UNMAPPED))
        self._add_reserved(mapped)
        block = pool.merged(block, FREE)
        pool.insert(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages inside a free block; its ends stay free and mapped."""
        range_, pool = block.range, block.pool
        begin = range_.base + -(-(block.address - range_.base) // range_.page) * range_.page
        end = range_.base + (block.address + block.size - range_.base) // range_.page * range_.page
        if begin >= end:
            return
        pool.take(block)
        head, tail = begin - block.address, block.address + block.size - end
        hole = block
        if head:
            hole = block.split_off(head, UNMAPPED)
            pool.insert(block)
        if tail:
            pool.insert(hole.split_off(end - begin, FREE))
        self.reserved -= end - begin
        self.driver.release(begin, end - begin)
        if self.log is not None:
            self.log.append((SEGMENT_UNMAP, begin, end - begin, pool.stream))
        hole = pool.merged(hole, UNMAPPED)
        if hole.left is None and hole.right is None:  # nothing of the range is mapped: it goes
            del self._heads[hole.address]
        else:
            pool.insert(hole)

    def _range_span(self, page: int) -> int:
        """Bytes of addresses that a range reserves: 9/8 of the device's memory, without end where that is unknown."""
        span = self._device_bytes // 8 * 9 if self._device_bytes is not None else RANGE_SPAN // 2
        return -(-span // page) * page

    # -- giving memory back -------------------------------------------------------------------------------------------

    def _release(self, block: Block) -> None:
        """Give back a segment that is one free block."""
        block.pool.take(block)
        del self._heads[block.address]
        self.reserved -= block.size
        self.driver.release(block.address, block.size)
        if self.log is not None:
            self.log.append((SEGMENT_FREE, block.address, block.size, block.pool.stream))

    def _release_cached_blocks(self) -> None:
        """Everything that is not pinned by a live block: waits for other streams, then large, small, private pools."""
        for block in list(self._pending.values()):
            self.complete_free(block)
        self._release_pools(0, small=False)
        self._release_pools(0, small=True)
        for owner in self._freeable:
            self._release_pools(owner, small=True)
            self._release_pools(owner, small=False)

    def _release_pools(self, owner: int, *, small: bool) -> None:
        pools = [pool for key, pool in sorted(self._pools.items()) if key[:2] == (owner, small)]
        to_unmap = []
        for pool in pools:
            for block in pool.free_blocks():
                if block.range is not None:
                    to_unmap.append(block)
                elif block.whole:
                    self._release(block)
        for block in to_unmap:
            self._unmap(block)

    def _release_available(self, pool: Pool, rounded: int) -> bool:
        """With max_split_size: one cached block that is large enough, or oversize ones from the largest down."""
        limit = self.config.max_split_bytes
        if limit is None:
            return False
        wanted = max(rounded, limit)
        index = pool.first_of(wanted)
        if index < len(pool.free) and pool.at(index).range is None:
            self._release(pool.at(index))
            return True
        released = 0
        for block in reversed(pool.free_blocks()[:index]):
            if released >= wanted or block.size < limit:
                break
            if block.range is None:
                self._release(block)
                released += block.size
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Give back whole cached segments of the large pool, oldest first, once the threshold is passed."""
        threshold = int(self.config.garbage_collection_threshold * self._allowed)
        if self.reserved <= threshold:
            return
        target, reclaimed = self.reserved - threshold, 0
        ages = {
            block: pool.searches[0] - block.born
            for key, pool in sorted(self._pools.items())
            if key[:2] == (0, False)
            for block in pool.free_blocks()
            if block.whole
        }
        while ages and reclaimed < target:
            # Blocks of the mean age and older go, also past the target, so that this does not run at every growth.
            mean = sum(ages.values()) / len(ages)
            old = [block for block, age in ages.items() if age >= mean]
            for block in old:
                del ages[block]
                reclaimed += block.size
                self._release(block)
            if not old:
                break


def _reach(block: Block) -> int:
    """The size that a free block of an expandable range could grow to."""
    right = block.right
    return block.size + (right.size if right is not None and right.state == UNMAPPED else 0)
