"""A Simulation as bytes and back, without torch: what reports need of it, not the recorded graph.

A line of JSON (names and plain values; tuples as {"t": [...]}) and, compressed, the integer columns one after another.

Note [Small columns]
    A repeated answer of many ranks takes as long as its columns are to decompress. So each is kept in the smallest
    dtype that holds it, and what would need eight bytes a row, or is no integer (shapes), as numbers into a table.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from metapeak.tracer.device.allocator_config import AllocatorConfig
from metapeak.tracer.device.overheads import Overhead, Overheads
from metapeak.tracer.device.reserve import OutOfMemoryAt, replayed
from metapeak.tracer.gpus import Gpu
from metapeak.tracer.liveness import Liveness
from metapeak.tracer.simulation import How, ModelSummary, Option, PipelineAction, RankResult, Simulation, UnaskedPhase

_ARRAYS = ("birth", "death", "nbytes", "category", "module", "source", "dtype")
_ARRAYS += ("op", "op_phase", "op_iteration", "op_module", "op_recompute", "op_node", "stream")
_NOT_PLAIN = ("liveness", "allocator", "overheads", "actions")  # of a RankResult: written in ways of their own
_NAMES = ("op_names", "module_names", "source_names", "dtype_names")
_RESERVATION = (
    "capacity",
    "allocated_peak",
    "reserved_peak",
    "allocated_end",
    "reserved_end",
    "unfragmented_peak",
    "retries",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedDtypes:
    """What is kept of a step graph: the dtypes of what the model made and returned."""

    output_dtypes: dict[str, str]


def simulation_to_bytes(simulation: Simulation) -> bytes:
    """The simulation, its ranks replayed through the allocator, without its graph. Raises TypeError for an option whose
    value is not plain.
    """
    chunks: list[bytes] = []
    ranks = [_rank_record(rank, chunks) for rank in simulation.ranks]
    record = {
        "model": asdict(simulation.model),
        "options": {name: [_plain(option.value), option.origin] for name, option in simulation.options.items()},
        "how": {**asdict(simulation.how), "seconds": dict(simulation.how.seconds), "cached": False},
        "ranks": ranks,
        "unasked": [asdict(phase) for phase in simulation.unasked],
        "output_dtypes": dict(simulation.graph.output_dtypes) if simulation.graph is not None else {},
        "suggestions": simulation.suggestions,
    }
    return json.dumps(record).encode() + b"\n" + zlib.compress(b"".join(chunks), 1)


def simulation_from_bytes(content: bytes, gpu: Gpu | None) -> Simulation:
    """The simulation in `content`, judged for `gpu`. Raises ValueError or KeyError for anything else."""
    line, _, packed = content.partition(b"\n")
    record = json.loads(line)
    data = memoryview(zlib.decompress(packed))
    ranks = tuple(_rank(rank, data) for rank in record["ranks"])
    how = {**record["how"], **{name: tuple(record["how"][name]) for name in ("assumptions", "not_modelled")}}
    simulation = Simulation(
        model=ModelSummary(**record["model"]),
        options={
            name: Option(value=_unplain(value), origin=origin) for name, (value, origin) in record["options"].items()
        },
        how=How(**how),
        ranks=ranks,
        unasked=tuple(UnaskedPhase(**phase) for phase in record["unasked"]),
        graph=RecordedDtypes(output_dtypes=record["output_dtypes"]),
        suggestions=record["suggestions"],
    )
    return replace(simulation, fit=simulation.worst.fit_on(gpu))


def _rank_record(rank: RankResult, chunks: list[bytes]) -> dict[str, Any]:
    liveness, result = rank.liveness, rank.reservation
    table: dict[tuple[int, ...], int] = {}
    shapes = np.array([table.setdefault(tuple(shape), len(table)) for shape in liveness.shapes], dtype=np.int64)
    columns = {name: getattr(liveness, name) for name in _ARRAYS if getattr(liveness, name) is not None}
    plain = [column.name for column in fields(rank) if column.name not in _NOT_PLAIN]
    return {
        "plain": {name: _plain(getattr(rank, name)) for name in plain},
        "columns": {name: _put(column, chunks) for name, column in columns.items()},
        "shapes": [list(table), _put(shapes, chunks)],
        "names": {name: list(getattr(liveness, name)) for name in _NAMES},
        "allocator": {column.name: _plain(getattr(rank.allocator, column.name)) for column in fields(rank.allocator)},
        "overheads": [asdict(item) for item in rank.overheads.items],
        "actions": [asdict(action) for action in rank.actions],
        "groups": rank.overheads.groups,
        "reservation": {name: getattr(result, name) for name in _RESERVATION},
        "oom": asdict(result.oom) if result.oom is not None else None,
    }


def _rank(record: dict[str, Any], data: memoryview) -> RankResult:
    columns = {name: _get(place, data) for name, place in record["columns"].items()}
    table, numbers = record["shapes"]
    shapes = _Shapes([tuple(shape) for shape in table], _get(numbers, data))
    liveness = Liveness(**{"op_node": None, **columns}, shapes=shapes, **record["names"])
    config = AllocatorConfig(**{name: _unplain(value) for name, value in record["allocator"].items()})
    rank = RankResult(
        **{name: _unplain(value) for name, value in record["plain"].items()},
        liveness=liveness,
        allocator=config,
        actions=tuple(PipelineAction(**action) for action in record["actions"]),
        overheads=Overheads(
            items=tuple(Overhead(**item) for item in record["overheads"]), groups=tuple(record["groups"])
        ),
    )
    oom = OutOfMemoryAt(**record["oom"]) if record["oom"] is not None else None
    # The replay takes longer than everything else here; what it found is known.
    rank.__dict__["reservation"] = replayed(liveness, config, oom=oom, **record["reservation"])
    return rank


class _Shapes(Sequence):
    """Shapes by row: most are alike, so that there is a table of them and each row's number in it."""

    def __init__(self, table: list[tuple[int, ...]], numbers: np.ndarray):
        self._table, self._numbers = table, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, row):
        if isinstance(row, slice):
            return [self._table[number] for number in self._numbers[row].tolist()]
        return self._table[self._numbers[row]]

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return map(self._table.__getitem__, self._numbers.tolist())


def _put(column: np.ndarray, chunks: list[bytes]) -> dict[str, Any]:
    """Where a column is that was put at the end of `chunks`, and its dtype: Note [Small columns]."""
    place: dict[str, Any] = {"dtype": column.dtype.str}
    if column.dtype.kind in "iu" and len(column):
        smallest = np.result_type(np.min_scalar_type(column.min()), np.min_scalar_type(column.max()))
        if smallest.itemsize > 4:
            table, column = np.unique(column, return_inverse=True)
            place["table"] = table.tolist()
            smallest = np.min_scalar_type(len(table))
        column = column.astype(smallest)
    column = np.ascontiguousarray(column)
    place |= {"kept": column.dtype.str, "start": sum(len(chunk) for chunk in chunks), "rows": len(column)}
    chunks.append(column.tobytes())
    return place


def _get(place: dict[str, Any], data: memoryview) -> np.ndarray:
    column = np.frombuffer(data, dtype=np.dtype(place["kept"]), count=place["rows"], offset=place["start"])
    if "table" in place:
        column = np.array(place["table"], dtype=np.dtype(place["dtype"]))[column]
    return column.astype(np.dtype(place["dtype"]), copy=False)


def _plain(value: Any) -> Any:
    """The value as JSON has it, tuples marked. Raises TypeError for what is not plain."""
    if isinstance(value, tuple):
        return {"t": [_plain(item) for item in value]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {"m": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"an option of type {type(value).__name__} cannot be kept")


def _unplain(value: Any) -> Any:
    if isinstance(value, dict):
        if "t" in value:
            return tuple(_unplain(item) for item in value["t"])
        return {_unplain(key): _unplain(item) for key, item in value["m"]}
    return [_unplain(item) for item in value] if isinstance(value, list) else value
