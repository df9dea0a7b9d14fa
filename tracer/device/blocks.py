"""Blocks, pools and segments: what the caching allocator keeps books on, and how a snapshot shows it."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

# States of a block. PENDING is freed by the program but still used by another stream.
ALLOCATED, PENDING, FREE, UNMAPPED = range(4)

# Actions in the log, with the words of a memory snapshot's trace.
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = range(8)
ACTION_NAMES = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom",
)  # fmt: skip

# A free block's sort key is size << _SHIFT | address: one integer compares as (size, address).
_SHIFT = 64
_MASK = (1 << _SHIFT) - 1


class Block:
    """A piece of a segment: `size` bytes at `address`, its neighbours, its state. Blocks tile their segment."""

    __slots__ = ("address", "born", "left", "pool", "range", "requested", "right", "size", "state")

    def __init__(self, address: int, size: int, pool: Pool, state: int, range_: ExpandableRange | None = None):
        self.address, self.size, self.pool, self.state, self.range = address, size, pool, state, range_
        self.left: Block | None = None
        self.right: Block | None = None
        self.requested = 0
        self.born = 0  # searches of the pool when it became free, for garbage collection

    def split_off(self, size: int, state: int) -> Block:
        """Keep `size` bytes; the rest is a new block in `state` to the right."""
        rest = Block(self.address + size, self.size - size, self.pool, state, self.range)
        rest.left, rest.right = self, self.right
        if rest.right is not None:
            rest.right.left = rest
        self.right, self.size = rest, size
        return rest

    def absorb_right(self) -> None:
        """Take over the block to the right, which nothing may hold any more."""
        right = self.right
        self.size += right.size
        self.right = right.right
        if self.right is not None:
            self.right.left = self

    @property
    def whole(self) -> bool:
        """Whether it is all of a segment that can go back to the driver at once."""
        return self.left is None and self.right is None and self.range is None


class Pool:
    """The free blocks of one stream in the small or large pool of the process (`owner` 0) or of a private pool.

    `free` holds the sort keys in order, `unmapped` the addresses of room in expandable ranges, `blocks` both kinds of
    blocks by address. `searches` is a list of one number that pools of different streams share: how often any of them
    was searched.
    """

    __slots__ = ("blocks", "free", "owner", "searches", "small", "stream", "unmapped")

    def __init__(self, owner: int, small: bool, stream: int, searches: list[int]):
        self.owner, self.small, self.stream, self.searches = owner, small, stream, searches
        self.free: list[int] = []
        self.unmapped: list[int] = []
        self.blocks: dict[int, Block] = {}

    def first_of(self, nbytes: int) -> int:
        """Index into `free` of the smallest block of `nbytes` or more (of equal ones the lowest address)."""
        return bisect_left(self.free, nbytes << _SHIFT)

    def at(self, index: int) -> Block:
        """The free block at an index into `free`."""
        return self.blocks[self.free[index] & _MASK]

    def pop(self, index: int) -> Block:
        """Take out the free block at an index into `free`."""
        return self.blocks.pop(self.free.pop(index) & _MASK)

    def free_blocks(self) -> list[Block]:
        """Every free block, by (size, address)."""
        return [self.blocks[key & _MASK] for key in self.free]

    def insert(self, block: Block) -> None:
        """Make a block free, or unmapped where its state says so."""
        self.blocks[block.address] = block
        if block.state == UNMAPPED:
            insort(self.unmapped, block.address)
            return
        block.state = FREE
        block.born = self.searches[0]
        insort(self.free, block.size << _SHIFT | block.address)

    def take(self, block: Block) -> None:
        """Take out a free or unmapped block."""
        if block.state == UNMAPPED:
            del self.unmapped[bisect_left(self.unmapped, block.address)]
        else:
            del self.free[bisect_left(self.free, block.size << _SHIFT | block.address)]
        del self.blocks[block.address]

    def merged(self, block: Block, state: int) -> Block:
        """The block joined with neighbours in `state` (FREE or UNMAPPED), which are taken out."""
        left = block.left
        if left is not None and left.state == state:
            self.take(left)
            left.absorb_right()
            block = left
        right = block.right
        if right is not None and right.state == state:
            self.take(right)
            block.absorb_right()
        block.state = state
        return block


@dataclass(slots=True, eq=False)
class ExpandableRange:
    """Reserved addresses of one expandable segment; pages are mapped as they are needed."""

    base: int
    page: int


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block as a snapshot shows it. `state` is ALLOCATED, PENDING or FREE."""

    address: int
    size: int
    requested: int
    state: int


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment, or one contiguous mapped run of an expandable one, with the blocks that tile it."""

    address: int
    size: int
    stream: int
    small: bool
    owner: int
    expandable: bool
    blocks: tuple[BlockView, ...]


def view_of(run: list[Block]) -> SegmentView:
    """The view of consecutive mapped blocks."""
    pool = run[0].pool
    return SegmentView(
        address=run[0].address,
        size=sum(block.size for block in run),
        stream=pool.stream,
        small=pool.small,
        owner=pool.owner,
        expandable=run[0].range is not None,
        blocks=tuple(BlockView(block.address, block.size, block.requested, block.state) for block in run),
    )
