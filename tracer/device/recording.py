"""The allocations of a recorded memory snapshot: size, lifetime, where in the program, and what is alive when.

Blocks that were there before the recording began are found from the frees that have no allocation and from what is
still allocated at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from metapeak.tracer.device.snapshot_reader import Snapshot
from metapeak.tracer.errors import InputError


@dataclass(frozen=True, slots=True)
class Frame:
    """A place in a program."""

    name: str
    filename: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.filename}:{self.line}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """One device's allocations in order of time; those from before the recording come first, born at event 0.

    `nbytes` (requested), `birth` (event that allocated it), `death` (event that freed it; number of events for what was
    not), `frame` (the innermost frame of the program, or of torch when there is none, or None), `in_program` (whether
    that frame is the program's own), `num_before` (how many were there before).
    """

    device: int
    nbytes: np.ndarray
    birth: np.ndarray
    death: np.ndarray
    frames: list[Frame | None]
    in_program: np.ndarray
    num_before: int
    num_events: int

    @property
    def has_frames(self) -> bool:
        return any(frame is not None for frame in self.frames)

    def live_bytes(self) -> np.ndarray:
        """Requested bytes alive after each event, shape [number of events]."""
        change = np.zeros(self.num_events + 1, dtype=np.int64)
        np.add.at(change, self.birth, self.nbytes)
        np.subtract.at(change, self.death, self.nbytes)
        return np.cumsum(change)[: self.num_events]

    def peak_event(self) -> int:
        """The event after which most is alive; of equal ones the last, which is the steadiest step's."""
        live = self.live_bytes()
        return self.num_events - 1 - int(live[::-1].argmax())

    def alive(self, event: int) -> np.ndarray:
        """Indices of the allocations alive after an event."""
        return np.flatnonzero((self.birth <= event) & (event < self.death))


def recording_of(snapshot: Snapshot, device: int | None = None) -> Recording:
    """The allocations of one device (None: the only one that has any).

    Raises InputError when the device has no events, or when several have and none is named.
    """
    recorded = [history.device for history in snapshot.recorded]
    if not recorded:
        raise InputError(
            f"{snapshot.path} holds no events. Record them: torch.cuda.memory._record_memory_history() before the "
            "model is built, _dump_snapshot() after a few steps."
        )
    listed = ", ".join(map(str, recorded))
    if device is None:
        if len(recorded) > 1:
            raise InputError(f"{snapshot.path} holds events of devices {listed}. Choose one with --device.")
        device = recorded[0]
    elif device not in recorded:
        raise InputError(f"{snapshot.path} holds no events of device {device}, but of {listed}.")
    return _read(snapshot, device)


def _read(snapshot: Snapshot, device: int) -> Recording:
    entries = snapshot.raw["device_traces"][device]
    rows = _rows(entries)
    at_end = {row.address for row in rows if row.death == len(entries)}
    before = [row for row in rows if row.birth < 0]
    for segment in snapshot.raw["segments"]:
        if segment.get("device", 0) == device:
            before += _blocks_of(segment, len(entries), at_end)
    rows = before + [row for row in rows if row.birth >= 0]
    chosen = [innermost_frame(row.frames, snapshot.path) for row in rows]
    return Recording(
        device=device,
        nbytes=np.array([row.nbytes for row in rows], dtype=np.int64),
        birth=np.array([max(row.birth, 0) for row in rows], dtype=np.int64),
        death=np.array([row.death for row in rows], dtype=np.int64),
        frames=[frame for frame, _ in chosen],
        in_program=np.array([own for _, own in chosen], dtype=bool),
        num_before=len(before),
        num_events=len(entries),
    )


@dataclass(slots=True)
class _Row:
    """An allocation; birth -1 is before the recording."""

    address: int
    nbytes: int
    birth: int
    death: int
    frames: Any


def _rows(entries: list[dict[str, Any]]) -> list[_Row]:
    """Every allocation that the events show, by its allocation or by its free."""
    rows: list[_Row] = []
    live: dict[int, _Row] = {}
    freed: set[int] = set()  # requested and not completed: memory that another stream still uses
    for event, entry in enumerate(entries):
        action = entry["action"]
        if action == "alloc":
            row = _Row(entry["addr"], entry["size"], event, len(entries), entry.get("frames"))
            live[row.address] = row
            rows.append(row)
        elif action == "free_requested" or (action == "free_completed" and entry["addr"] not in freed):
            row = live.pop(entry["addr"], None)
            if row is None:
                row = _Row(entry["addr"], entry["size"], -1, event, None)
                rows.append(row)
            row.death = event
            if action == "free_requested":
                freed.add(row.address)
        elif action == "free_completed":
            freed.discard(entry["addr"])
    return rows


def _blocks_of(segment: dict[str, Any], num_events: int, known: set[int]) -> list[_Row]:
    """The blocks that are allocated at the end and have no event."""
    rows = []
    position = segment["address"]
    for block in segment["blocks"]:
        address = block.get("address", position)
        if block["state"] == "active_allocated" and address not in known:
            nbytes = block.get("requested_size", block["size"])
            rows.append(_Row(address, nbytes, -1, num_events, block.get("frames")))
        position = address + block["size"]
    return rows


def innermost_frame(frames: Any, path: str) -> tuple[Frame | None, bool]:
    """(the innermost frame that is neither torch's nor native, True); without one, torch's innermost of Python or None.

    Frames of a snapshot come innermost first. Raises InputError for frames that are no frames.
    """
    if not frames:
        return None, False
    fallback = None
    for frame in _checked(frames, path):
        if not _is_python(frame.filename):
            continue
        if not _is_torch(frame.filename):
            return frame, True
        fallback = fallback or frame
    return fallback, False


def _checked(frames: Any, path: str) -> Iterable[Frame]:
    if not isinstance(frames, list):
        raise InputError(f"{path} is no sound memory snapshot: frames is a {type(frames).__name__}, not a list.")
    for frame in frames:
        values = [frame.get(key) for key in ("name", "filename", "line")] if isinstance(frame, dict) else [None]
        if [type(value) for value in values] != [str, str, int]:
            raise InputError(f"{path} is no sound memory snapshot: a frame has no name, filename and line.")
        yield Frame(*values)


def _is_python(filename: str) -> bool:
    """Not `??`, a C++ file or one of our snapshots' frames that are no lines."""
    return filename.endswith(".py") or (filename.startswith("<ipython") or "/ipykernel_" in filename)


def _is_torch(filename: str) -> bool:
    return filename.startswith("torch/") or "site-packages/torch/" in filename or "dist-packages/torch/" in filename
