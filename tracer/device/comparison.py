"""A recorded step beside a predicted one: which allocations are the same, and what only one of the peaks holds.

Requests are matched in order (alignment.py): the sizes have to be equal, and so do the source files where both sides
know one. A recording usually holds more steps than a prediction; the prediction's last iteration is repeated as often
as the recording is long. Tensors alive at the peaks are paired by those matches first, and the others by size alone,
which is all that can be done for what was allocated before the recording began.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from metapeak.tracer.device.alignment import align, positions_mask
from metapeak.tracer.device.recording import Recording
from metapeak.tracer.device.reserve import allocation_order
from metapeak.tracer.liveness import Category, Instant, Liveness, Phase

MAX_REPEATS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """Requests of one side, and how many of them (and of their bytes) were matched in order."""

    count: int
    nbytes: int
    matched: int
    matched_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Tensors of one peak that the other has not: `where` they were made, in or after which `module`."""

    nbytes: int
    count: int
    where: str
    module: str
    category: str
    largest_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleShare:
    """A module's bytes at the predicted peak: found in the recording in order, by size alone, or not."""

    module: str
    predicted_bytes: int
    in_order_bytes: int
    by_size_bytes: int

    @property
    def only_predicted_bytes(self) -> int:
        return self.predicted_bytes - self.in_order_bytes - self.by_size_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What `compare` finds. All bytes are requested bytes.

    `same_line` of `lines` matched requests that know their source line on both sides name the same one.
    `recorded_peak_at` is the predicted operation that the recorded peak corresponds to by the matches around it.
    """

    device: int
    recorded: Requests
    predicted: Requests
    repeats: int
    before_bytes: int
    has_frames: bool
    lines: int
    same_line: int
    recorded_peak_bytes: int
    predicted_peak_bytes: int
    predicted_peak_at: Instant
    recorded_peak_at: Instant | None
    in_order_bytes: int
    by_size_bytes: int
    missed: tuple[Group, ...]
    extra: tuple[Group, ...]
    modules: tuple[ModuleShare, ...]

    @property
    def missed_bytes(self) -> int:
        return sum(group.nbytes for group in self.missed)

    @property
    def extra_bytes(self) -> int:
        return sum(group.nbytes for group in self.extra)


def compare(recording: Recording, liveness: Liveness) -> Comparison:
    """The recording beside the prediction."""
    rows, repeats = _predicted_requests(liveness, len(recording.nbytes) - recording.num_before)
    files = _SourceFiles(liveness)
    pairs = _match(recording, liveness, rows, files)
    peak_event, peak_index = recording.peak_event() if recording.num_events else 0, liveness.peak_index()
    sides = _Peaks(recording, liveness, pairs, peak_event, peak_index)
    lines = [
        (files.line(storage), (files.known(frame.filename), frame.line))
        for storage, index in pairs
        if (frame := recording.frames[index]) is not None and recording.in_program[index] and files.line(storage)
    ]
    return Comparison(
        device=recording.device,
        recorded=_requests(recording.nbytes, range(recording.num_before, len(recording.nbytes)), {i for _, i in pairs}),
        predicted=_requests(liveness.nbytes, rows[: len(rows) - repeats.added], {s for s, _ in pairs}),
        repeats=repeats.count,
        before_bytes=int(recording.nbytes[: recording.num_before].sum()),
        has_frames=recording.has_frames,
        lines=len(lines),
        same_line=sum(ours == theirs for ours, theirs in lines),
        recorded_peak_bytes=int(recording.nbytes[sides.recorded].sum()),
        predicted_peak_bytes=int(liveness.nbytes[sides.predicted].sum()),
        predicted_peak_at=liveness.instant(peak_index),
        recorded_peak_at=sides.recorded_peak_at(),
        in_order_bytes=sum(int(liveness.nbytes[storage]) for storage in sides.in_order),
        by_size_bytes=sum(int(liveness.nbytes[storage]) for storage in sides.by_size),
        missed=tuple(sides.missed()),
        extra=tuple(sides.extra()),
        modules=tuple(sides.modules()),
    )


@dataclass(frozen=True, slots=True)
class _Repeats:
    count: int
    added: int


def _predicted_requests(liveness: Liveness, recorded: int) -> tuple[list[int], _Repeats]:
    """(storages in the order of their allocation, the last iteration repeated to the recording's length)."""
    storage, is_alloc, _ = allocation_order(liveness)
    rows = storage[is_alloc].tolist()
    last = int(liveness.op_iteration.max(initial=0))
    again = [row for row in rows if liveness.op_iteration[liveness.birth[row]] == last]
    lacking = recorded - len(rows)
    count = min(-(-lacking // len(again)), MAX_REPEATS) if again and lacking > 0 else 0
    return rows + again * count, _Repeats(count, len(again) * count)


def _requests(nbytes: np.ndarray, rows, matched: set[int]) -> Requests:
    rows = np.fromiter(rows, dtype=np.int64)
    hit = np.isin(rows, np.fromiter(matched, dtype=np.int64, count=len(matched)))
    return Requests(
        count=len(rows),
        nbytes=int(nbytes[rows].sum()),
        matched=int(hit.sum()),
        matched_bytes=int(nbytes[rows[hit]].sum()),
    )


class _SourceFiles:
    """Source lines of the prediction, and recorded file names in its spelling (from the package on)."""

    def __init__(self, liveness: Liveness):
        self._lines: list[tuple[str, int]] = []
        for name in liveness.source_names:
            filename, _, line = name.rpartition(":")
            self._lines.append((filename, int(line)))
        self._source = liveness.source
        self._files = {filename for filename, _ in self._lines}
        self._spelled: dict[str, str] = {}

    def line(self, storage: int) -> tuple[str, int] | None:
        source = int(self._source[storage])
        return self._lines[source] if source >= 0 else None

    def known(self, filename: str) -> str:
        """The prediction's name of a recorded file, or the recorded one."""
        if filename not in self._spelled:
            path = filename.replace("\\", "/")
            ends = [known for known in self._files if path == known or path.endswith("/" + known)]
            self._spelled[filename] = max(ends, key=len, default=path)
        return self._spelled[filename]


def _match(recording: Recording, liveness: Liveness, rows: list[int], files: _SourceFiles) -> list[tuple[int, int]]:
    """(storage, recorded allocation) of the requests that are the same, in order."""
    first = recording.num_before
    length = len(recording.nbytes) - first
    by_key: dict[tuple[int, str | None], list[int]] = defaultdict(list)
    for position, nbytes in enumerate(recording.nbytes[first:].tolist()):
        frame = recording.frames[first + position] if recording.in_program[first + position] else None
        by_key[nbytes, files.known(frame.filename) if frame else None].append(position)
    by_size: dict[int, list[int]] = defaultdict(list)
    for (nbytes, _), positions in by_key.items():
        by_size[nbytes] += positions
    masks: dict[tuple[int, str | None], int] = {}

    def mask(nbytes: int, filename: str | None) -> int:
        key = (nbytes, filename)
        if key not in masks:
            fits = by_size[nbytes] if filename is None else by_key[key] + by_key[nbytes, None]
            masks[key] = positions_mask(fits, length) if fits else 0
        return masks[key]

    sizes = liveness.nbytes.tolist()
    lines = [files.line(row) for row in rows]
    wanted = [mask(sizes[row], line[0] if line else None) for row, line in zip(rows, lines)]
    return [(rows[row], first + position) for row, position in align(wanted, length)]


class _Peaks:
    """What is alive at the two peaks, paired."""

    def __init__(self, recording: Recording, liveness: Liveness, pairs, peak_event: int, peak_index: int):
        self._recording, self._liveness, self._peak_event = recording, liveness, peak_event
        self.recorded = recording.alive(peak_event)
        alive = liveness.alive(peak_index)
        self.predicted = alive[liveness.nbytes[alive] > 0]
        self._matched_indices = [index for _, index in pairs]
        self._matched_storages = [storage for storage, _ in pairs]
        only_recorded, only_predicted = set(self.recorded.tolist()), set(self.predicted.tolist())
        self.in_order: list[int] = []
        for storage, index in pairs:
            if index in only_recorded and storage in only_predicted:
                only_recorded.remove(index)
                only_predicted.remove(storage)
                self.in_order.append(storage)
        self.by_size: list[int] = []
        left = defaultdict(list)
        for index in sorted(only_recorded, reverse=True):
            left[int(recording.nbytes[index])].append(index)
        for storage in sorted(only_predicted):
            if left[int(liveness.nbytes[storage])]:
                only_recorded.remove(left[int(liveness.nbytes[storage])].pop())
                self.by_size.append(storage)
        only_predicted.difference_update(self.by_size)
        self._only_recorded, self._only_predicted = sorted(only_recorded), sorted(only_predicted)

    def recorded_peak_at(self) -> Instant | None:
        """The predicted operation of the last request matched before the recorded peak."""
        births = self._recording.birth[self._matched_indices] if self._matched_indices else []
        position = int(np.searchsorted(births, self._peak_event, side="right")) - 1
        if position < 0:
            return None
        return self._liveness.instant(int(self._liveness.birth[self._matched_storages[position]]))

    def missed(self) -> list[Group]:
        """Tensors of the recorded peak that the predicted one lacks."""
        recording, liveness = self._recording, self._liveness
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for index in self._only_recorded:
            frame = recording.frames[index]
            if index < recording.num_before:
                where, module = "before the recording began", ""
            else:
                where = f"{frame.place} {frame.name}" if frame else "no Python frames"
                position = bisect_right(self._matched_indices, index) - 1
                storage = self._matched_storages[position] if position >= 0 else None
                module = pattern_of(liveness.module_names[liveness.module[storage]]) if storage is not None else ""
            groups[where, module].append(int(recording.nbytes[index]))
        return _sorted(_group(sizes, where, module) for (where, module), sizes in groups.items())

    def extra(self) -> list[Group]:
        """Tensors of the predicted peak that the recorded one lacks."""
        liveness = self._liveness
        groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for storage in self._only_predicted:
            source, birth = int(liveness.source[storage]), int(liveness.birth[storage])
            line = liveness.source_names[source] + " " if source >= 0 else ""
            where = f"{line}{liveness.op_names[liveness.op[birth]]}, {Phase(int(liveness.op_phase[birth])).label}"
            module = pattern_of(liveness.module_names[liveness.module[storage]])
            category = Category(int(liveness.category[storage])).name.lower()
            groups[where, module, category].append(int(liveness.nbytes[storage]))
        return _sorted(_group(sizes, where, module, category) for (where, module, category), sizes in groups.items())

    def modules(self) -> list[ModuleShare]:
        """Every module pattern of the predicted peak, in the model's order."""
        liveness = self._liveness
        shares = [Counter(), Counter(), Counter()]
        for counter, storages in zip(shares, (self.predicted.tolist(), self.in_order, self.by_size)):
            for storage in storages:
                pattern = pattern_of(liveness.module_names[liveness.module[storage]])
                counter[pattern] += int(liveness.nbytes[storage])
        total, in_order, by_size = shares
        order = {pattern_of(name): place for place, name in reversed(list(enumerate(liveness.module_names)))}
        return [
            ModuleShare(
                module=pattern,
                predicted_bytes=total[pattern],
                in_order_bytes=in_order[pattern],
                by_size_bytes=by_size[pattern],
            )
            for pattern in sorted(total, key=order.__getitem__)
        ]


def _group(sizes: list[int], where: str, module: str, category: str = "") -> Group:
    return Group(
        nbytes=sum(sizes), count=len(sizes), where=where, module=module, category=category, largest_bytes=max(sizes)
    )


def pattern_of(module: str) -> str:
    """A module path with its numbers as stars: repeated blocks are one row.

    >>> pattern_of("model.layers.3.mlp")
    'model.layers.*.mlp'
    """
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _sorted(groups) -> list[Group]:
    return sorted(groups, key=lambda group: (-group.nbytes, group.where, group.module))
