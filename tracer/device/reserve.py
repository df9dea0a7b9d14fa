"""A step's storages through the caching allocator: allocated and reserved bytes, every event, the segments.

Order of events: before an operation runs, what died since the last one is freed; then its outputs and workspaces are
allocated in the order of their rows; what it made superfluous is freed after it. That is CUDA's order: an operator
allocates before the references to its inputs go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from metapeak.tracer.collection import uncollected
from metapeak.tracer.device.address_space import InventedAddresses
from metapeak.tracer.device.allocator import CachingAllocator, OutOfMemory
from metapeak.tracer.device.allocator_config import DEFAULT_CONFIG, ROUND_LARGE_BYTES, SMALL_BYTES, AllocatorConfig
from metapeak.tracer.device.blocks import (
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Block,
    SegmentView,
)
from metapeak.tracer.errors import InputError
from metapeak.tracer.liveness import Liveness


@dataclass(frozen=True, kw_only=True, eq=False)
class AllocatorEvents:
    """The history as columns of one length, in the words and the order of a memory snapshot's trace.

    `action` (an index into blocks.ACTION_NAMES), `address`, `size` (requested bytes of an alloc or free, segment
    bytes of a segment's, rounded request of an oom), `stream`; `storage` (row of the liveness, -1 for segments); `op`
    (operation of the liveness before or during which it happens); `allocated`, `reserved` (bytes after the event).
    """

    action: np.ndarray
    address: np.ndarray
    size: np.ndarray
    stream: np.ndarray
    storage: np.ndarray
    op: np.ndarray
    allocated: np.ndarray
    reserved: np.ndarray

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemoryAt:
    """Where a step ran out of the given capacity: operation, storage, bytes asked for and bytes reserved by then."""

    op: int
    storage: int
    requested: int
    reserved: int


@dataclass(frozen=True, kw_only=True, eq=False)
class AllocatorResult:
    """What the allocator makes of a step.

    `allocated_peak` is torch.cuda.max_memory_allocated(): whole blocks, with what was not split off. `reserved_peak` is
    torch.cuda.max_memory_reserved(); `allocated_end` and `reserved_end` are what memory_allocated() and
    memory_reserved() say after the step. `unfragmented_peak` is the least that any placement could reserve: live blocks
    of the small and of the large pool, each rounded up to 2 MiB. `retries` counts how often cached segments had to
    go back to the driver; `oom` is where the capacity did not suffice (the history ends there), or None.
    """

    config: AllocatorConfig
    capacity: int | None
    allocated_peak: int
    reserved_peak: int
    allocated_end: int
    reserved_end: int
    unfragmented_peak: int
    retries: int
    oom: OutOfMemoryAt | None
    _make_run: Callable[[], _Run]

    @functools.cached_property
    def _run(self) -> _Run:
        return self._make_run()

    @property
    def reserved_range(self) -> tuple[int, int]:
        """(reserved without any fragmentation, reserved by the default replay), in bytes."""
        return min(self.unfragmented_peak, self.reserved_peak), self.reserved_peak

    @functools.cached_property
    def events(self) -> AllocatorEvents:
        """Every event (allocations, frees, segments); made when first asked for."""
        return self._run.events()

    @functools.cached_property
    def end_segments(self) -> list[SegmentView]:
        """The segments with their blocks after the last event."""
        return self._run.segments_after(len(self._run.storage))

    @functools.cached_property
    def peak_segments(self) -> list[SegmentView]:
        """The segments with their blocks right after reserved memory first reached its peak."""
        return self._run.segments_after(self._run.steps_to_reserved_peak())


@uncollected()
def reserve(
    liveness: Liveness,
    config: AllocatorConfig | None = None,
    *,
    capacity: int | None = None,
) -> AllocatorResult:
    """The step of `liveness` through the caching allocator.

    Arguments: settings (None: PyTorch's defaults); `capacity`, the bytes that the driver has for segments (the card's
    memory less context and other processes; None: without end, so that no retry ever frees cached segments).

    Raises InputError for settings that need a capacity when there is none.
    """
    config = config or DEFAULT_CONFIG
    if config.memory_fraction < 1 and capacity is None:
        raise InputError(
            f"per_process_memory_fraction:{config.memory_fraction:g} is a fraction of a GPU's memory. "
            "Give --gpu or --gpu-memory with it."
        )
    run = _run_of(liveness, config, capacity)
    storage, is_alloc, op, sizes = run.storage, run.is_alloc, run.op, run.sizes
    allocator, played = run.play()
    oom = None
    if played < len(storage):
        oom = OutOfMemoryAt(
            op=int(op[played]),
            storage=int(storage[played]),
            requested=sizes[storage[played]],
            reserved=allocator.reserved,
        )
    return AllocatorResult(
        config=config,
        capacity=capacity,
        allocated_peak=allocator.allocated_peak,
        reserved_peak=allocator.reserved_peak,
        allocated_end=allocator.allocated,
        reserved_end=allocator.reserved,
        unfragmented_peak=_unfragmented_peak(liveness, config, storage, is_alloc),
        retries=allocator.retries,
        oom=oom,
        _make_run=functools.partial(_itself, run),
    )


def _itself(run: _Run) -> _Run:
    return run


def replayed(
    liveness: Liveness, config: AllocatorConfig, *, capacity: int | None, oom: OutOfMemoryAt | None, **found: int
) -> AllocatorResult:
    """The result of a replay whose numbers (`found`: the fields of AllocatorResult) are known; events on demand."""
    make = functools.partial(_run_of, liveness, config, capacity)
    return AllocatorResult(config=config, capacity=capacity, oom=oom, _make_run=make, **found)


def _run_of(liveness: Liveness, config: AllocatorConfig, capacity: int | None) -> _Run:
    storage, is_alloc, op = allocation_order(liveness)
    stream = liveness.stream.tolist() if liveness.stream is not None else None
    return _Run(config, capacity, liveness.nbytes.tolist(), stream, storage, is_alloc, op)


def allocation_order(liveness: Liveness) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(storage, is_alloc, op): a row for every allocation and free that reaches the allocator, in order of time.

    Storages without bytes never reach it; what outlives the step is not freed.
    """
    rows = np.flatnonzero((liveness.nbytes > 0) & (liveness.birth < liveness.death))
    dying = rows[liveness.death[rows] <= liveness.num_ops]
    storage = np.concatenate([dying, rows])
    is_alloc = np.repeat([False, True], [len(dying), len(rows)])
    op = np.concatenate([liveness.death[dying], liveness.birth[rows]]).astype(np.int64)
    order = np.lexsort((storage, is_alloc, op))
    return storage[order], is_alloc[order], op[order]


@dataclass(frozen=True, slots=True)
class _Run:
    """A history that can be played again, as far and with as much recorded as is wanted.

    `storage`, `is_alloc`, `op` have a row a step, `sizes` and `stream` a row a storage.
    """

    config: AllocatorConfig
    capacity: int | None
    sizes: list[int]
    stream: list[int] | None
    storage: np.ndarray
    is_alloc: np.ndarray
    op: np.ndarray

    def play(
        self, *, stop: int | None = None, log: list | None = None, marks: list[tuple[int, int, int]] | None = None
    ) -> tuple[CachingAllocator, int]:
        """The allocator after the first `stop` steps (None: all), and how many were played before memory ran out.

        `log` gets the events, `marks` after every step (events so far, allocated bytes, reserved bytes).
        """
        driver = InventedAddresses(capacity=self.capacity)
        allocator = CachingAllocator(self.config, driver, device_bytes=self.capacity, log=log)
        sizes, stream = self.sizes, self.stream
        live: dict[int, Block] = {}
        malloc, free = allocator.malloc, allocator.free
        played = 0
        try:
            for storage, is_alloc in zip(self.storage[:stop].tolist(), self.is_alloc.tolist()):
                if not is_alloc:
                    free(live.pop(storage))
                elif stream is None:
                    live[storage] = malloc(sizes[storage])
                else:
                    live[storage] = malloc(sizes[storage], stream[storage])
                played += 1
                if marks is not None:
                    marks.append((len(log or ()), allocator.allocated, allocator.reserved))
        except OutOfMemory:
            if marks is not None:
                marks.append((len(log or ()), allocator.allocated, allocator.reserved))
        return allocator, played

    def events(self) -> AllocatorEvents:
        log: list[tuple[int, int, int, int]] = []
        marks: list[tuple[int, int, int]] = []
        self.play(log=log, marks=marks)
        columns = np.array(log, dtype=np.int64).reshape(-1, 4)
        table = np.array(marks, dtype=np.int64).reshape(-1, 3)
        step = np.repeat(np.arange(len(table)), np.diff(table[:, 0], prepend=0))
        action = columns[:, 0].astype(np.int8)
        of_segment = np.isin(action, [SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP])
        change = np.where(np.isin(action, [SEGMENT_ALLOC, SEGMENT_MAP]), columns[:, 2], -columns[:, 2])
        return AllocatorEvents(
            action=action,
            address=columns[:, 1],
            size=columns[:, 2],
            stream=columns[:, 3],
            storage=np.where(of_segment, -1, self.storage[step]),
            op=self.op[step],
            allocated=table[step, 1],
            reserved=np.cumsum(np.where(of_segment, change, 0)),
        )

    def segments_after(self, steps: int) -> list[SegmentView]:
        return self.play(stop=steps)[0].segments()

    def steps_to_reserved_peak(self) -> int:
        """How many steps it takes until reserved memory is at its peak."""
        marks: list[tuple[int, int, int]] = []
        self.play(marks=marks)
        return int(np.argmax([reserved for _, _, reserved in marks])) + 1 if marks else 0


def _unfragmented_peak(liveness: Liveness, config: AllocatorConfig, storage: np.ndarray, is_alloc: np.ndarray) -> int:
    """Most bytes that live blocks take, the small and the large pool each rounded up to whole segment units."""
    rounded = np.array([config.round_size(nbytes) for nbytes in np.unique(liveness.nbytes).tolist()], dtype=np.int64)
    sizes = rounded[np.unique(liveness.nbytes, return_inverse=True)[1]][storage]
    change = np.where(is_alloc, sizes, -sizes)
    small = sizes <= SMALL_BYTES
    pools = [np.cumsum(np.where(of_pool, change, 0)) for of_pool in (small, ~small)]
    total = sum(-(-live // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES for live in pools)
    return int(total.max(initial=0))
