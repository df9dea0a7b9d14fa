"""A recorded allocator history through our allocator, compared request by request.

The recording gives what a program decides (requests, frees, calls of empty_cache) and what the driver decides (where a
segment lies, whether there is memory left). Everything else the allocator has to find by itself: when it grows and by
how much, which block a request gets, what goes back to the driver.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from metapeak.tracer.device.address_space import InventedAddresses, top_below
from metapeak.tracer.device.allocator import CachingAllocator, OutOfMemory
from metapeak.tracer.device.allocator_config import SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorConfig
from metapeak.tracer.device.blocks import (
    ALLOC,
    FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    PENDING,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Block,
    ExpandableRange,
)
from metapeak.tracer.device.snapshot_reader import DeviceHistory, Entry
from metapeak.tracer.device.unwind import StartState, start_state

_GROWTHS, _RELEASES = (SEGMENT_ALLOC, SEGMENT_MAP), (SEGMENT_FREE, SEGMENT_UNMAP)


@dataclass(kw_only=True, slots=True)
class Tally:
    """How many were recorded, how many of them the replay made at the same request, how many it made beside them."""

    recorded: int = 0
    matched: int = 0
    false: int = 0

    def compare(self, recorded: Sequence, replayed: Sequence) -> None:
        """Count one request's: the same ones, in any order."""
        wanted, made = Counter(recorded), Counter(replayed)
        same = sum((wanted & made).values())
        self.recorded += len(recorded)
        self.matched += same
        self.false += len(replayed) - same


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """Out-of-memory retries, and what a driver of one constant `capacity` (bytes) would have done.

    The capacity is the most that was ever reserved. `recorded` are the requests at which cached segments went back and
    memory grew beyond what that capacity allowed before; `predicted` those of a replay in which the capacity alone
    decides; `matched` are in both. `ooms_recorded` failed for good, `ooms_matched` do so in that replay, too.
    `unexplained` are growths after a release that the capacity would have allowed without it: calls of empty_cache by
    the program, or memory that other processes held at the time.
    """

    recorded: int
    predicted: int
    matched: int
    ooms_recorded: int
    ooms_matched: int
    unexplained: int
    capacity: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayResult:
    """One device's history, recorded and replayed; bytes are integers."""

    device: int
    starts_empty: bool
    requests: int
    growths: Tally
    releases: Tally
    addresses: Tally
    peak_reserved_recorded: int
    peak_reserved_replayed: int
    peak_allocated_replayed: int
    retries: Retries

    @property
    def exact(self) -> bool:
        """Whether the replay differs in nothing."""
        tallies = (self.growths, self.releases, self.addresses)
        return self.peak_reserved_recorded == self.peak_reserved_replayed and all(
            tally.recorded == tally.matched and not tally.false for tally in tallies
        )


def replay(history: DeviceHistory, config: AllocatorConfig, *, blind: bool = False) -> ReplayResult:
    """The history of one device through the allocator.

    With `blind` the addresses of segments are invented instead of taken from the recording. Raises InputError when the
    events contradict the segments.
    """
    state = start_state(history, config)
    run = _Replay(history, config, state, blind=blind)
    run.play()
    return ReplayResult(
        device=history.device,
        starts_empty=state.reserved == 0,
        requests=sum(entry.action == ALLOC for entry in history.entries),
        growths=run.growths,
        releases=run.releases,
        addresses=run.addresses,
        peak_reserved_recorded=_recorded_peak(history, state),
        peak_reserved_replayed=run.allocator.reserved_peak,
        peak_allocated_replayed=run.allocator.allocated_peak,
        retries=_retries(history, config, state, run),
    )


def _recorded_peak(history: DeviceHistory, state: StartState) -> int:
    reserved = peak = state.reserved
    for entry in history.entries:
        if entry.action in _GROWTHS:
            reserved += entry.size
            peak = max(peak, reserved)
        elif entry.action in _RELEASES:
            reserved -= entry.size
    return peak


@dataclass(slots=True)
class _RecordedDriver:
    """A driver that answers as the recorded one did at the request at hand.

    `script` are the segment events recorded for it. Where they show memory going back before a growth, the driver had
    refused: so does this one. With `blind` addresses are invented; without, they are when the recording has none.
    """

    invented: InventedAddresses
    blind: bool
    max_refusals: int
    capacity: int | None = None
    used: int = 0
    script: list[Entry] = field(default_factory=list)
    fails: bool = False
    refusals: int = 0
    due: int = 0
    released: int = 0
    range_ahead: Callable[[], int | None] = lambda: None

    def begin(
        self, script: Sequence[Entry], *, fails: bool, range_ahead: Callable[[], int | None] = lambda: None
    ) -> None:
        """`range_ahead` says where the pool's next pages are recorded, for a range that this request may reserve."""
        self.script, self.fails, self.range_ahead = list(script), fails, range_ahead
        self.refusals = self.due = self.released = 0

    def allocate(self, nbytes: int) -> int | None:
        if self._refuses(nbytes):
            return None
        entry = self._next_growth()
        self.used += nbytes
        address = self.invented.allocate(nbytes)
        return entry.address if entry is not None and entry.size == nbytes and not self.blind else address

    def reserve_range(self) -> int:
        address = None if self.blind else self.range_ahead()
        return self.invented.reserve_range() if address is None else address

    def map(self, address: int, nbytes: int) -> bool:
        if self._refuses(nbytes):
            return False
        self._next_growth()
        self.used += nbytes
        return True

    def release(self, address: int, nbytes: int) -> None:
        self.released += 1
        self.used -= nbytes

    def _refuses(self, nbytes: int) -> bool:
        if self.capacity is not None:
            return self.used + nbytes > self.capacity
        releases = 0
        while releases < len(self.script) and self.script[releases].action in _RELEASES:
            releases += 1
        self.due += releases
        del self.script[:releases]
        if self.refusals < self.max_refusals and (releases or self.due > self.released):
            self.refusals += 1
            return True
        return self.fails and not self.script

    def _next_growth(self) -> Entry | None:
        while self.script and self.script[0].action in _RELEASES:
            del self.script[0]
        return self.script.pop(0) if self.script else None


class _Replay:
    """Plays the entries of one device.

    `capacity` lets the driver refuse by it instead of by the recording; before the entries `emptied` the program calls
    empty_cache.
    """

    def __init__(
        self,
        history: DeviceHistory,
        config: AllocatorConfig,
        state: StartState,
        *,
        blind: bool,
        capacity: int | None = None,
        emptied: Collection[int] = (),
    ):
        self.history, self.config, self.blind, self.emptied = history, config, blind, emptied
        self.growths, self.releases, self.addresses = Tally(), Tally(), Tally()
        self.retried: list[int] = []  # entries at which cached segments went back for want of memory
        self.failed: list[int] = []
        self.recorded_retries: list[int] = []
        self.recorded_ooms: list[int] = []
        self.log: list[tuple[int, int, int, int]] = []
        used = [segment.address for segment in history.segments] + [
            entry.address for entry in history.entries if entry.action in _GROWTHS
        ]
        self.driver = _RecordedDriver(
            invented=InventedAddresses(top=top_below(used)),
            blind=blind,
            max_refusals=1 if config.max_split_bytes is None else 2,
            capacity=capacity,
            used=state.reserved,
        )
        self.allocator = CachingAllocator(config, self.driver, log=self.log)
        self.live: dict[int, Block] = {}
        self._translation = _Translation()
        self._adopt(state, config)
        self._owner = _Owners(history, state)
        self._maps = _Maps(history)

    def _adopt(self, state: StartState, config: AllocatorConfig) -> None:
        for segment in state.segments:
            self.live.update(self.allocator.adopt([segment]))
            self._translation.add(segment.address, segment.address)
        for key, runs in state.runs.items():
            range_ = ExpandableRange(base=state.range_bases[key], page=config.page_bytes(small=key.small))
            self.live.update(self.allocator.adopt(runs, range_))
            self._translation.add(range_.base, range_.base)

    def play(self) -> None:
        script: list[Entry] = []
        for index, entry in enumerate(self.history.entries):
            if entry.action == ALLOC or entry.action == OOM:
                self._request(index, entry, script)
                script = []
            elif entry.action in (FREE_REQUESTED, FREE_COMPLETED):
                if script:
                    self._empty_cache(script)
                    script = []
                self._free(entry)
            else:
                script.append(entry)
        if script:
            self._empty_cache(script)

    def _request(self, index: int, entry: Entry, script: list[Entry]) -> None:
        owner = self._owner.of(entry)
        releases = [event for event in script if event.action in _RELEASES]
        growths = [event for event in script if event.action in _GROWTHS]
        fails = entry.action == OOM
        # A retry comes before a growth, or a failure, of what the cache could not serve.
        by_program = index in self.emptied or not (growths or fails)
        if releases and (by_program or self.allocator.fits(entry.size, entry.stream, owner)):
            self._empty_cache(releases)
            releases, script = [], growths
        if releases or fails:
            self.recorded_retries.append(index)
        if fails:
            self.recorded_ooms.append(index)
        small = self.config.round_size(entry.size) <= SMALL_BYTES
        self.driver.begin(script, fails=fails, range_ahead=lambda: self._maps.first_after(index, entry.stream, small))
        self.log.clear()
        block = None
        try:
            block = self.allocator.malloc(entry.size, entry.stream, owner)
        except OutOfMemory:
            self.failed.append(index)
        if block is None or any(action in _RELEASES for action, *_ in self.log):
            self.retried.append(index)
        self._compare(releases, growths)
        if fails:
            if block is not None:
                self.allocator.free(block)
            return
        self.addresses.recorded += 1
        if block is None:
            return
        self.live[entry.address] = block
        self.addresses.matched += self._translation.recorded(block.address) == entry.address

    def _empty_cache(self, recorded: Sequence[Entry]) -> None:
        self.driver.begin([], fails=False)
        self.log.clear()
        self.allocator.empty_cache()
        self._compare(
            [event for event in recorded if event.action in _RELEASES],
            [event for event in recorded if event.action in _GROWTHS],
        )

    def _free(self, entry: Entry) -> None:
        block = self.live.get(entry.address)
        if block is None:
            return  # its request failed in this replay
        if entry.action == FREE_REQUESTED:
            self.allocator.request_free(block)
            return
        del self.live[entry.address]
        if block.state == PENDING:
            self.allocator.complete_free(block)
        elif block.state != FREE:  # else the retry had waited for it
            self.allocator.free(block)

    def _compare(self, releases: list[Entry], growths: list[Entry]) -> None:
        made = [(action, address, size) for action, address, size, _ in self.log if action in _GROWTHS]
        self.growths.compare([event.size for event in growths], [size for _, _, size in made])
        for event, (action, address, _) in zip(growths, made):
            if action == SEGMENT_ALLOC or self._translation.recorded(address) is None:
                self._translation.add(address, event.address)
        self.releases.compare(
            [(event.address, event.size) for event in releases],
            [
                (self._translation.recorded(address), size)
                for action, address, size, _ in self.log
                if action in _RELEASES
            ],
        )


class _Translation:
    """Recorded addresses of our segments: the same ones, unless they were invented."""

    def __init__(self):
        self._ours: list[int] = []
        self._recorded: dict[int, int] = {}

    def add(self, ours: int, recorded: int) -> None:
        if ours not in self._recorded:
            insort(self._ours, ours)
        self._recorded[ours] = recorded

    def recorded(self, address: int) -> int | None:
        index = bisect_right(self._ours, address) - 1
        if index < 0:
            return None
        base = self._ours[index]
        return self._recorded[base] + address - base


class _Maps:
    """Where pages are mapped next for a pool: the start of a range that is reserved now.

    A range can be reserved long before: a request that fails leaves the one that it reserved.
    """

    def __init__(self, history: DeviceHistory):
        self._found: dict[tuple[int, bool], tuple[list[int], list[int]]] = {}
        script: list[Entry] = []
        for index, entry in enumerate(history.entries):
            if entry.action == SEGMENT_MAP:
                script.append(entry)
            elif entry.action == ALLOC:
                for event in script:
                    key = (event.stream, event.size == SMALL_SEGMENT_BYTES)
                    indices, addresses = self._found.setdefault(key, ([], []))
                    indices.append(index)
                    addresses.append(event.address)
                script = []

    def first_after(self, index: int, stream: int, small: bool) -> int | None:
        """The address of the first mapping of the pool at or after entry `index`."""
        indices, addresses = self._found.get((stream, small), ([], []))
        at = bisect_left(indices, index)
        return addresses[at] if at < len(addresses) else None


class _Owners:
    """The pool of a request: what its event says, else the pool of the segment that it was given a place in."""

    def __init__(self, history: DeviceHistory, state: StartState):
        views = [*history.segments, *state.segments, *(run for runs in state.runs.values() for run in runs)]
        private = {view.address: view for view in views if view.owner}
        self._views = sorted(private.values(), key=lambda view: view.address)
        self._starts = [view.address for view in self._views]

    def of(self, entry: Entry) -> int:
        if entry.owner is not None:
            return entry.owner
        index = bisect_right(self._starts, entry.address) - 1
        if index >= 0 and entry.address < self._views[index].address + self._views[index].size:
            return self._views[index].owner
        return 0


def _retries(history: DeviceHistory, config: AllocatorConfig, state: StartState, run: _Replay) -> Retries:
    """Recorded retries beside those of a replay in which a constant capacity alone decides when the driver refuses."""
    capacity, refused = _capacity(history, config, state, set(run.recorded_retries))
    unexplained = set(run.recorded_retries) - refused
    predicted = run
    if run.recorded_retries:
        predicted = _Replay(history, config, state, blind=False, capacity=capacity, emptied=unexplained)
        predicted.play()
    return Retries(
        recorded=len(refused),
        predicted=len(predicted.retried),
        matched=len(refused & set(predicted.retried)),
        ooms_recorded=len(run.recorded_ooms),
        ooms_matched=len(set(run.recorded_ooms) & set(predicted.failed)),
        unexplained=len(unexplained),
        capacity=capacity,
    )


def _capacity(
    history: DeviceHistory, config: AllocatorConfig, state: StartState, retried: set[int]
) -> tuple[int, set[int]]:
    """(the most that was reserved, those of `retried` that would have gone beyond it before memory went back)."""
    reserved = most = state.reserved
    wanted: dict[int, int] = {}
    script: list[Entry] = []
    for index, entry in enumerate(history.entries):
        if entry.action in _GROWTHS or entry.action in _RELEASES:
            script.append(entry)
            continue
        growth = sum(event.size for event in script if event.action in _GROWTHS)
        if entry.action == OOM:
            growth = config.segment_bytes(config.round_size(entry.size))
        if index in retried:
            wanted[index] = reserved + growth
        for event in script:
            reserved += event.size if event.action in _GROWTHS else -event.size
            most = max(most, reserved)
        script = []
    return most, {index for index, nbytes in wanted.items() if nbytes > most}
