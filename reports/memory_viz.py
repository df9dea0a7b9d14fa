"""A predicted step as a CUDA memory snapshot, for pytorch.org/memory_viz and torch.cuda._memory_viz.

What the caching allocator would have recorded: every allocation and free with its address, every segment, and the
blocks that are left at the end. Addresses are invented, `time_us` counts operations. The frames of an allocation say,
innermost first, which operator made it and on which source line, what it is for, in which modules and in which phase.
Each distinct rank is a device of the file.

Source: torch/csrc/cuda/memory_snapshot.cpp (`_memory_snapshot_pickled`) for the fields; torch/utils/viz/MemoryViz.js
for what the viewer needs (pickle protocol 2 to 4, plain values, three fields in every frame).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from metapeak.tracer.device.allocator_config import POWER2_ENTRIES, AllocatorConfig
from metapeak.tracer.device.blocks import ACTION_NAMES, ALLOC, ALLOCATED, FREE, PENDING, SegmentView
from metapeak.tracer.liveness import Category, Liveness, Phase
from metapeak.tracer.simulation import RankResult, Simulation

PICKLE_PROTOCOL = 4  # the newest that the viewer reads

_STATES = {ALLOCATED: "active_allocated", PENDING: "active_pending_free", FREE: "inactive"}

# File names of frames that are no source lines.
OPERATOR, CATEGORY, MODULE, PHASE = "<operator>", "<category>", "<module>", "<phase>"


def render_snapshot(simulation: Simulation) -> bytes:
    """The pickled snapshot."""
    return pickle.dumps(snapshot_of_simulation(simulation), protocol=PICKLE_PROTOCOL)


def snapshot_of_simulation(simulation: Simulation) -> dict[str, Any]:
    """The snapshot as torch.cuda.memory._snapshot() returns it; device i is the i-th of the distinct ranks."""
    histories = [_History(rank, device) for device, rank in enumerate(simulation.ranks)]
    return {
        "segments": [segment for history in histories for segment in history.segments()],
        "device_traces": [list(history.entries()) for history in histories],
        "allocator_settings": _settings(simulation.ranks[0].allocator),
        "external_annotations": [],
    }


class _History:
    """One rank's events, with the frames of every storage made once."""

    def __init__(self, rank: RankResult, device: int):
        self._result, self._liveness, self._device = rank.reservation, rank.liveness, device
        self._events = self._result.events
        self._frames: dict[int, list[dict[str, Any]]] = {}
        self._known: dict[tuple[str, str, int], dict[str, Any]] = {}

    def entries(self) -> Iterator[dict[str, Any]]:
        events = self._events
        columns = (events.action, events.address, events.size, events.stream, events.storage, events.op)
        for action, address, size, stream, storage, op in zip(*(column.tolist() for column in columns)):
            yield {
                "action": ACTION_NAMES[action],
                "addr": address,
                "size": size,
                "stream": stream,
                "time_us": op,
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": self._frames_of(storage) if action == ALLOC else [],
            }

    def segments(self) -> list[dict[str, Any]]:
        owners = self._last_owners()
        return [
            self._segment(view, owners) for view in sorted(self._result.end_segments, key=lambda view: view.address)
        ]

    def _last_owners(self) -> dict[int, int]:
        """The storage that was last allocated at each address."""
        made = self._events.action == ALLOC
        return dict(zip(self._events.address[made].tolist(), self._events.storage[made].tolist()))

    def _segment(self, view: SegmentView, owners: dict[int, int]) -> dict[str, Any]:
        active = [block for block in view.blocks if block.state == ALLOCATED]
        held = [block for block in view.blocks if block.state != FREE]
        return {
            "device": self._device,
            "address": view.address,
            "total_size": view.size,
            "allocated_size": sum(block.size for block in active),
            "active_size": sum(block.size for block in held),
            "requested_size": sum(block.requested for block in held),
            "stream": view.stream,
            "segment_type": "small" if view.small else "large",
            "segment_pool_id": (0, view.owner),
            "is_expandable": view.expandable,
            "frames": [],
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": _STATES[block.state],
                    "frames": self._frames_of(owners[block.address]) if block.state == ALLOCATED else [],
                }
                for block in view.blocks
            ],
        }

    def _frames_of(self, storage: int) -> list[dict[str, Any]]:
        if storage not in self._frames:
            self._frames[storage] = [self._frame(*frame) for frame in frames_of(self._liveness, storage)]
        return self._frames[storage]

    def _frame(self, name: str, filename: str, line: int) -> dict[str, Any]:
        """One dictionary a frame: a pickle holds what is shared once."""
        return self._known.setdefault((name, filename, line), {"name": name, "filename": filename, "line": line})


def frames_of(liveness: Liveness, storage: int) -> Iterator[tuple[str, str, int]]:
    """(name, file name, line) of a storage's frames, innermost first: operator, category, modules, phase."""
    birth = int(liveness.birth[storage])
    source = int(liveness.source[storage])
    filename, line = OPERATOR, 0
    if source >= 0:
        filename, _, number = liveness.source_names[source].rpartition(":")
        line = int(number)
    yield liveness.op_names[liveness.op[birth]], filename, line
    yield Category(int(liveness.category[storage])).name.lower(), CATEGORY, 0
    path = liveness.module_names[liveness.module[storage]]
    while path:
        yield path, MODULE, 0
        path = path.rpartition(".")[0]
    iteration = int(liveness.op_iteration[birth])
    yield f"{Phase(int(liveness.op_phase[birth])).label} {iteration}" if iteration else "load", PHASE, 0


def _settings(config: AllocatorConfig) -> dict[str, Any]:
    """The settings in the words of a recorded snapshot."""
    return {
        "PYTORCH_CUDA_ALLOC_CONF": config.text,
        "max_split_size": -1 if config.max_split_bytes is None else config.max_split_bytes,
        "garbage_collection_threshold": config.garbage_collection_threshold,
        "expandable_segments": config.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {
            str(1 << entry): config.power2_divisions[entry] for entry in range(POWER2_ENTRIES)
        },
    }
