"""Rewrite a recorded step as if regions of its forward ran under torch.autograd.graph.save_on_cpu.

What it changes: everything that the region's operations save is copied to the host when it is saved, and back to the
device when backward reads it; nothing is held on the device in between.
Where each byte comes from: the saves of the trace; a copy has the size of the saved tensor, dense, and lives on the
device as long as what backward read in its place.
Not modelled: transfers on streams of their own (copies overlap with nothing); the contiguous buffer that CUDA makes for
a moment to copy an expanded tensor.
Source: torch/autograd/graph.py, save_on_cpu.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

import numpy as np

from metapeak.strategies.recompute import Holds, latest, settle_categories
from metapeak.strategies.regions import Region
from metapeak.tracer.graph import StepGraph
from metapeak.tracer.liveness import Category, Liveness

_COPY = "aten._to_copy.default"
_BITS = {"bool": 8, "float8_e4m3fn": 8, "float8_e5m2": 8}


def offloaded(graph: StepGraph, regions: Iterable[Region]) -> tuple[Liveness, int]:
    """(the liveness of the step, the most bytes that lie on the host at a time)."""
    saved, plain, holds = graph.saved, graph.liveness(), Holds.of(graph)
    chosen = np.zeros(len(saved.value), dtype=bool)
    for region in regions:
        chosen[region.saves.start : region.saves.stop] = True
    saves = np.flatnonzero(chosen)
    nbytes = np.array([_tensor_bytes(graph, saved.value[save]) for save in saves], dtype=np.int64)

    # One operation more for every copy: to the host when a tensor is saved, back when it is read.
    packed = np.array([saved.packed_tick, saved.packed], dtype=np.int64).T[saves]
    back = np.array([saved.unpacked_tick, saved.unpacked], dtype=np.int64).T[saves]
    read = back[:, 0] >= 0
    inserted = np.concatenate([packed, back[read]])
    order = np.argsort(inserted[:, 0], kind="stable")
    ticks = inserted[order, 0]

    def moved(events: np.ndarray) -> np.ndarray:
        return events[:, 1] + np.searchsorted(ticks, events[:, 0], side="left")

    death = latest(holds.eager, holds.save_row[~chosen], holds.release[~chosen])
    kept = ~chosen[holds.ghost_save]
    death = latest(death, holds.save_row[holds.ghost_save[kept]], holds.ghost[kept])

    # What comes back lives as long as what backward read in its place.
    ends = latest(back.copy(), np.searchsorted(saves, holds.ghost_save[~kept]), holds.ghost[~kept])[read]
    rows = holds.save_row[saves[read]]
    source = np.insert(np.arange(plain.num_ops), inserted[order, 1], -1)
    liveness = _with_copies(plain, source, saved, order, len(saves), inserted)
    liveness = replace(
        liveness,
        birth=np.concatenate([moved(np.stack([holds.op_tick[plain.birth], plain.birth], 1)), moved(back[read])]).astype(
            np.int32
        ),
        death=np.concatenate([moved(death), moved(ends)]).astype(np.int32),
        nbytes=np.concatenate([plain.nbytes, nbytes[read]]),
        category=np.concatenate([plain.category, np.full(len(rows), Category.ACTIVATION, dtype=np.int8)]),
        module=np.concatenate([plain.module, plain.module[rows]]),
        source=np.concatenate([plain.source, plain.source[rows]]),
        dtype=np.concatenate([plain.dtype, plain.dtype[rows]]),
        stream=None if plain.stream is None else np.concatenate([plain.stream, plain.stream[rows]]),
        shapes=[*plain.shapes, *(graph.value_shape[saved.value[save]] for save in saves[read])],
    )
    liveness = replace(liveness, category=settle_categories(liveness))
    liveness.lint()
    return liveness, _most_on_host(packed[:, 0], holds.release[saves, 0], nbytes)


def _tensor_bytes(graph: StepGraph, value: int) -> int:
    name = graph.dtype_names[graph.value_dtype[value]]
    bits = _BITS.get(name) or int("".join(letter for letter in name if letter.isdigit()) or 8)
    return prod(graph.value_shape[value]) * bits // 8


def _with_copies(plain: Liveness, source: np.ndarray, saved, order, count: int, inserted: np.ndarray) -> Liveness:
    """The operation columns with a copy where `source` is -1: of the phase in which it happens."""
    copies = np.flatnonzero(source < 0)
    near = np.minimum(inserted[order, 1], plain.num_ops - 1)  # the operation that follows
    near = np.where(order < count, np.maximum(near - 1, 0), near)  # a save follows the operations before it
    names = [*plain.op_names]
    if _COPY not in names:
        names.append(_COPY)
    columns = {}
    for name in ("op", "op_phase", "op_iteration", "op_module", "op_recompute"):
        column = getattr(plain, name)[source]
        column[copies] = getattr(plain, name)[near]
        columns[name] = column
    columns["op"][copies] = names.index(_COPY)
    columns["op_node"] = np.where(source < 0, -1, plain.op_node[source])
    return replace(plain, op_names=names, **columns)


def _most_on_host(start: np.ndarray, end: np.ndarray, nbytes: np.ndarray) -> int:
    if not len(start):
        return 0
    ticks = np.concatenate([start, end])
    change = np.concatenate([nbytes, -nbytes])
    return int(np.cumsum(change[np.argsort(ticks, kind="stable")]).max())
