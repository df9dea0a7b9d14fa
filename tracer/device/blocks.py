"""Blocks, pools and segments: what the caching allocator keeps books on, and how a snapshot shows it."""

from __future__ import annotations

from dataclasses import dataclass

# States of a block. PENDING is freed by the program but still used by another stream.
ALLOCATED, PENDING, FREE, UNMAPPED = range(4)

# Actions in the log, with the words of a memory snapshot's trace.
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = range(8)
ACTION_NAMES = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom",
)  # fmt: skip


class Block:
    """A piece of a segment: `size` bytes at `address`, its neighbours, its state. Blocks tile their segment."""

    __slots__ = ("address", "born", "left", "pool", "range", "requested", "right", "size", "state")

    def __init__(self, address: int, size: int, pool: Pool, state: int, range_: ExpandableRange | None = None):
        self.address, self.size, self.pool, self.state, self.range = address, size, pool, state, range_
        self.left: Block | None = None
        self.right: Block | None = None
        self.requested = 0
        self.born = 0  # searches of the pool when it became free, for garbage collection


class Pool:
    """The free blocks of one stream in the small or large pool of the process (`owner` 0) or of a private pool.

    `free` holds the sort keys in order, `unmapped` the addresses of room in expandable ranges, `blocks` both kinds of
    blocks by address.
    """

    __slots__ = ("blocks", "free", "owner", "small", "stream", "unmapped")

    def __init__(self, owner: int, small: bool, stream: int):
        self.owner, self.small, self.stream = owner, small, stream
        self.free: list[int] = []
        self.unmapped: list[int] = []
        self.blocks: dict[int, Block] = {}


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
