"""Which storages of a step an out-of-memory message can be about.

A request fails when no cached block can take it and the driver refuses the segment. So a candidate is a storage whose
segment (after the allocator's rounding) prints as the message's size; storages of one operator, module kind, shape and
phase are one candidate. They are ranked by what is known of the instant: does the replay of the step through the
allocator on a device of the message's size fail just there; how far are the bytes allocated before the request from
those that the message gives; does the replay without end ask the driver for that segment at that instant.

Without a storage of that size, lengths are tried (`scaled_candidates`): the message may come from a longer or shorter
batch than was simulated, and a tensor with tokens among its dimensions tells how long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from metapeak.tracer.device.allocator_config import AllocatorConfig
from metapeak.tracer.device.blocks import SEGMENT_ALLOC, SEGMENT_MAP
from metapeak.tracer.device.oom_message import OomMessage
from metapeak.tracer.device.reserve import AllocatorResult
from metapeak.tracer.liveness import Category, Instant, Liveness, LiveTensor, round_to_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Storages that could be the one that failed: `tensor` is the one at the best instant, `instant` its operation,
    `count` how many are like it in the step.

    `allocated_before` is what the allocator has handed out when it is asked for, in the simulation. `grows`: the
    replayed allocator asks the driver for memory then. `fails_here`: on a device of the message's size it fails there.
    `tokens` is the number of tokens a batch needs for this size, where that is not the simulated number.
    """

    tensor: LiveTensor
    instant: Instant
    count: int
    segment_bytes: int
    allocated_before: int
    grows: bool
    fails_here: bool = False
    tokens: int | None = None

    @property
    def module_pattern(self) -> str:
        return _pattern(self.tensor.module or self.instant.module)


def exact_candidates(
    liveness: Liveness, message: OomMessage, result: AllocatorResult, failed: AllocatorResult | None = None
) -> list[Candidate]:
    """Candidates of the message's size, likeliest first.

    `result` is the step through the allocator on a device without end, `failed` on one of the message's capacity.
    """
    sizes, rows = np.unique(liveness.nbytes, return_inverse=True)
    fits = np.array(
        [nbytes > 0 and _segment(int(nbytes), message, result.config) in message.requested for nbytes in sizes]
    )
    wanted = np.flatnonzero(fits[rows]) if len(sizes) else np.array([], dtype=np.int64)
    return _ranked(liveness, message, result, failed, ((int(row), None) for row in wanted))


def scaled_candidates(
    liveness: Liveness, message: OomMessage, result: AllocatorResult, lengths: tuple[int, ...]
) -> list[Candidate]:
    """Candidates that have the message's size at another number of tokens, likeliest first.

    `lengths` are numbers of tokens that stand for the batch in a shape: batch x sequence, and the sequence.
    """

    def scaled() -> Iterator[tuple[int, int]]:
        for row, shape in enumerate(liveness.shapes):
            for length in lengths:
                if length > 1 and list(shape).count(length) == 1 and liveness.category[row] != Category.WORKSPACE:
                    tokens = round(message.requested.middle / (int(liveness.nbytes[row]) / length))
                    if tokens > 0 and _half_to_double(tokens, length):
                        yield row, tokens
                        break

    return _ranked(liveness, message, result, None, scaled())


def _half_to_double(tokens: int, length: int) -> bool:
    """A batch is hardly ever further than a factor of four from the one that somebody remembers."""
    return length / 4 <= tokens <= length * 4 and tokens != length


def _segment(nbytes: int, message: OomMessage, config: AllocatorConfig) -> int:
    return nbytes if message.names_request else config.segment_bytes(config.round_size(nbytes))


def _ranked(liveness, message, result, failed, rows) -> list[Candidate]:
    before = _allocated_before(liveness)
    growths = _growths(result)
    failing = failed.oom.storage if failed is not None and failed.oom is not None else -1
    groups: dict[tuple, list[tuple[tuple, int, int | None]]] = {}
    for row, tokens in rows:
        birth = int(liveness.birth[row])
        key = (
            _pattern(liveness.module_names[liveness.op_module[birth]]),
            _pattern(liveness.module_names[liveness.module[row]]),
            liveness.shapes[row],
            int(liveness.dtype[row]),
            int(liveness.op[birth]),
            int(liveness.op_phase[birth]),
        )
        groups.setdefault(key, []).append((_order(row, liveness, message, before, growths, failing), row, tokens))
    ranked = sorted((min(members, key=lambda item: item[:2]), len(members)) for members in groups.values())
    return [
        Candidate(
            tensor=liveness.tensor(row),
            instant=liveness.instant(int(liveness.birth[row])),
            count=count,
            segment_bytes=_segment(int(liveness.nbytes[row]), message, result.config),
            allocated_before=int(before[row]),
            grows=row in growths,
            fails_here=row == failing,
            tokens=tokens,
        )
        for (_, row, tokens), count in ranked
    ]


def _order(row, liveness, message, before, growths, failing) -> tuple:
    """Smaller is likelier: fails there; asks the driver there; its bytes in use are close to the message's; larger
    storages and later iterations first where nothing else is known.
    """
    distance = abs(int(before[row]) - message.allocated.middle) if message.allocated is not None else 0
    steady = -int(liveness.op_iteration[liveness.birth[row]]) if message.allocated is None else 0
    return row != failing, distance // (1 << 28), row not in growths, distance, steady


def _allocated_before(liveness: Liveness) -> np.ndarray:
    """For every storage, the bytes of the blocks in use when it is asked for."""
    live = liveness.live_bytes(rounded=True)
    sizes = round_to_blocks(liveness.nbytes)
    # Storages of one operation come in the order of their rows; the ones after it are not there yet.
    order = np.lexsort((np.arange(len(sizes)), liveness.birth))
    later = np.zeros(len(sizes), dtype=np.int64)
    births = liveness.birth[order]
    running = np.cumsum(sizes[order])
    ends = np.searchsorted(births, births, side="right") - 1
    later[order] = running[ends] - running + sizes[order]
    return live[np.minimum(liveness.birth, liveness.num_ops - 1)] - later


def _growths(result: AllocatorResult) -> set[int]:
    """Rows of the storages for which the replay asked the driver for memory."""
    events = result.events
    grown = np.flatnonzero(np.isin(events.action, [SEGMENT_ALLOC, SEGMENT_MAP]))
    following = np.minimum(grown + 1, len(events) - 1)
    # The allocation that a segment is for comes right after it in the history, maps of one range may come several.
    rows: set[int] = set()
    for index in following.tolist():
        while index < len(events) and events.storage[index] < 0:
            index += 1
        if index < len(events):
            rows.add(int(events.storage[index]))
    return rows


def _pattern(path: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
