"""Memory snapshots (torch.cuda.memory._dump_snapshot) as checked, plain values.

Source: torch/csrc/cuda/memory_snapshot.cpp (`_memory_snapshot_pickled`) for the fields, and files of every format since
torch 2.0: older ones lack allocator_settings, pool ids, the addresses of blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from metapeak.tracer.device.allocator_config import DEFAULT_CONFIG, AllocatorConfig, config_of_snapshot
from metapeak.tracer.device.blocks import ACTION_NAMES, ALLOCATED, FREE, OOM, PENDING, BlockView, SegmentView
from metapeak.tracer.device.plain_pickle import read_plain_pickle
from metapeak.tracer.errors import InputError

_ACTIONS = {name: action for action, name in enumerate(ACTION_NAMES)}
# Entries that move no memory.
_REMARKS = ("snapshot", "user_defined")
_STATES = {
    "active_allocated": ALLOCATED,
    "active_pending_free": PENDING,
    "active_awaiting_free": PENDING,
    "inactive": FREE,
}
_MOST_BLOCKS = 5_000_000
# More than any device has; keeps sums of sizes and sort keys in bounds.
_HIGHEST = 1 << 62


class Entry(NamedTuple):
    """One event of a trace: `action` indexes ACTION_NAMES, `owner` numbers the private pool (0: default, None: unsaid).

    `size` is what the file says: requested bytes of an alloc or free, segment bytes, the rounded request of an oom.
    """

    action: int
    address: int
    size: int
    stream: int
    owner: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceHistory:
    """The recorded events of one device in order, and its segments (sorted by address) at the end of them."""

    device: int
    entries: list[Entry]
    segments: list[SegmentView]


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A snapshot: one history for every device, with or without events; `raw` is the file's own dictionary."""

    path: str
    config: AllocatorConfig
    settings_recorded: bool
    histories: tuple[DeviceHistory, ...]
    raw: Mapping[str, Any]

    @property
    def recorded(self) -> list[DeviceHistory]:
        """The devices that have events."""
        return [history for history in self.histories if history.entries]


def read_snapshot(path: str | Path) -> Snapshot:
    """The snapshot in a file, plain or compressed by xz or gzip. Nothing in the file is executed.

    Raises InputError (one sentence) for a file that is unreadable, damaged, holds more than plain data, or is no
    snapshot, and what `config_of_snapshot` raises for its settings.
    """
    return snapshot_of(read_plain_pickle(path), str(path))


def snapshot_of(raw: Any, path: str = "the snapshot") -> Snapshot:
    """The snapshot that a dictionary in the layout of torch.cuda.memory._snapshot() describes. Raises InputError."""
    if not isinstance(raw, dict) or "segments" not in raw or "device_traces" not in raw:
        keys = ", ".join(map(_short, list(raw)[:5])) if isinstance(raw, dict) else ""
        found = f"a dictionary of {keys or 'nothing'}" if isinstance(raw, dict) else f"a {type(raw).__name__}"
        raise InputError(
            f"{path} is no memory snapshot: it holds {found}, not `segments` and `device_traces`. Write one with "
            "torch.cuda.memory._dump_snapshot()."
        )
    check = _Checker(path)
    traces = check.list_of(raw["device_traces"], list, "device_traces")
    pools = _PoolNumbers()
    segments: dict[int, list[SegmentView]] = {device: [] for device in range(len(traces))}
    listed = check.list_of(raw["segments"], dict, "segments")
    # One list of blocks can stand in many segments, which takes few bytes in the file and many here.
    if sum(len(segment["blocks"]) for segment in listed if isinstance(segment.get("blocks"), list)) > _MOST_BLOCKS:
        raise InputError(f"{path} lists more than {_MOST_BLOCKS:,} blocks, which no device holds.")
    for number, segment in enumerate(listed):
        where = f"segments[{number}]"
        device = check.integer(segment.get("device", 0), f"{where}.device")
        if device not in segments:
            raise InputError(
                f"{path} holds a segment of device {device}, but traces of {len(traces)} devices (0 to "
                f"{len(traces) - 1}): segments and traces are not of one process."
            )
        segments[device].append(_segment(segment, where, check, pools))
    settings = raw.get("allocator_settings", {})
    if not isinstance(settings, dict):
        raise InputError(f"{path}: allocator_settings is a {type(settings).__name__}, but should be a dictionary.")
    return Snapshot(
        path=path,
        config=config_of_snapshot(settings) if settings else DEFAULT_CONFIG,
        settings_recorded=bool(settings),
        histories=tuple(
            DeviceHistory(
                device=device,
                entries=_entries(trace, device, check, pools),
                segments=_sorted(segments[device], check),
            )
            for device, trace in enumerate(traces)
        ),
        raw=raw,
    )


class _PoolNumbers:
    """Small integers for the (int, int) ids of memory pools; (0, 0) is the default pool, 0."""

    def __init__(self):
        self._numbers: dict[tuple, int] = {(0, 0): 0}

    def of(self, identity: Any, where: str, check: _Checker) -> int:
        if not (isinstance(identity, tuple | list) and len(identity) == 2):
            raise check.wrong(where, identity, "a pair of numbers")
        pair = tuple(check.integer(part, where) for part in identity)
        return self._numbers.setdefault(pair, len(self._numbers))


class _Checker:
    """Takes values of the expected kind, or raises InputError with the place."""

    def __init__(self, path: str):
        self.path = path

    def wrong(self, where: str, value: Any, wanted: str) -> InputError:
        return InputError(
            f"{self.path} is no sound memory snapshot: {where} is {_short(value)}, but should be {wanted}."
        )

    def integer(self, value: Any, where: str) -> int:
        if type(value) is not int or not 0 <= value < _HIGHEST:
            raise self.wrong(where, value, "a number from 0 to 2^62")
        return value

    def list_of(self, value: Any, kind: type, where: str) -> list:
        if not isinstance(value, list):
            raise self.wrong(where, value, "a list")
        for number, item in enumerate(value):
            if not isinstance(item, kind):
                raise self.wrong(f"{where}[{number}]", item, f"a {kind.__name__}")
        return value


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _segment(segment: dict, where: str, check: _Checker, pools: _PoolNumbers) -> SegmentView:
    kind = segment.get("segment_type", "large")
    if kind not in ("large", "small"):
        raise check.wrong(f"{where}.segment_type", kind, "large or small")
    address = check.integer(segment.get("address"), f"{where}.address")
    size = check.integer(segment.get("total_size"), f"{where}.total_size")
    blocks, position = [], address
    for number, block in enumerate(check.list_of(segment.get("blocks"), dict, f"{where}.blocks")):
        place = f"{where}.blocks[{number}]"
        nbytes = check.integer(block.get("size"), f"{place}.size")
        begin = check.integer(block.get("address", position), f"{place}.address")
        state = block.get("state")
        if not isinstance(state, str) or state not in _STATES:
            raise check.wrong(f"{place}.state", state, " or ".join(_STATES))
        if begin != position or nbytes == 0:
            raise check.wrong(f"{place}.address", begin, f"{position}: blocks fill their segment without gaps")
        requested = check.integer(block.get("requested_size", nbytes), f"{place}.requested_size")
        blocks.append(BlockView(begin, nbytes, requested, _STATES[state]))
        position += nbytes
    if position != address + size:
        raise check.wrong(f"{where}.total_size", size, f"{position - address}, the sum of its blocks")
    return SegmentView(
        address=address,
        size=size,
        stream=check.integer(segment.get("stream", 0), f"{where}.stream"),
        small=kind == "small",
        owner=pools.of(segment.get("segment_pool_id", (0, 0)), f"{where}.segment_pool_id", check),
        expandable=segment.get("is_expandable", False) is True,
        blocks=tuple(blocks),
    )


def _sorted(segments: list[SegmentView], check: _Checker) -> list[SegmentView]:
    ordered = sorted(segments, key=lambda segment: segment.address)
    for before, after in itertools.pairwise(ordered):
        if before.address + before.size > after.address:
            raise check.wrong("segments", after.address, "an address outside the segment before it")
    return ordered


def _entries(trace: list, device: int, check: _Checker, pools: _PoolNumbers) -> list[Entry]:
    entries = []
    integer = check.integer
    for number, entry in enumerate(trace):
        where = f"device_traces[{device}][{number}]"
        if not isinstance(entry, dict):
            raise check.wrong(where, entry, "a dict")
        name = entry.get("action")
        if not isinstance(name, str) or name not in _ACTIONS:
            if name in _REMARKS:
                continue
            raise check.wrong(f"{where}.action", name, ", ".join(ACTION_NAMES))
        action = _ACTIONS[name]
        address = integer(entry.get("addr"), where + ".addr") if action != OOM else 0
        pool = entry.get("pool_id")
        owner = pools.of(pool, where + ".pool_id", check) if pool is not None else None
        entries.append(
            Entry(
                action,
                address,
                integer(entry.get("size"), where + ".size"),
                integer(entry.get("stream", 0), where),
                owner,
            )
        )
    return entries
