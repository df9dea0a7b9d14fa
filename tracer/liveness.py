"""When each storage lives, as flat integer columns, and everything that can be asked of them.

Time is the index of the operation being executed. A storage lives from its `birth`, the operation that allocates it, up
to but not including its `death`, the first operation that runs after it was freed: it is counted at instant t when
birth <= t < death. One that is freed after the last operation has death == number of operations, one that outlives the
step has one more. So the live bytes at an instant are those after the operation allocated and before anything it made
superfluous is freed, as an allocator sees them.

Nothing here imports torch.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


class Category(enum.IntEnum):
    """What a storage is for. The order is the order of reports."""

    PARAMETER = 0
    GRADIENT = 1
    OPTIMIZER_STATE = 2
    ACTIVATION = 3
    TEMPORARY = 4
    BUFFER = 5
    INPUT = 6
    COMMUNICATION = 7
    WORKSPACE = 8


class Phase(enum.IntEnum):
    """The part of a training run that an operation belongs to."""

    LOAD = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    EVALUATION = 4
    GENERATION = 5
    SAVE = 6

    @property
    def label(self) -> str:
        return self.name.lower()


# Blocks of PyTorch's CUDA caching allocator: c10/core/AllocatorConfig.h, kMinBlockSize.
BLOCK_BYTES = 512


def round_to_blocks(nbytes):
    """Bytes of the block that the CUDA caching allocator hands out for a request of `nbytes` (int or array)."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePeak:
    """Peak and end of one phase of one iteration, in bytes."""

    iteration: int
    phase: str
    peak_bytes: int
    end_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveTensor:
    """A storage that is alive at some instant."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    module: str
    born_phase: str
    born_iteration: int
    source_line: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Instant:
    """An operation of the step."""

    index: int
    iteration: int
    phase: str
    op: str
    module: str
    recompute: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Liveness:
    """Storages (columns of one length) over operations (columns of another).

    Storage columns, each of shape [number of storages]: `birth` and `death` (operation indices), `nbytes` (requested),
    `category` (Category), `module` (the owner) and `source` (indices into the tables of names; source -1 is none),
    `dtype` (index), `stream` (0 is the default one; None: all on it). `shapes` holds the shape of the first tensor on
    each storage.
    Operation columns, each of shape [number of operations]: `op` (index), `op_phase` (Phase), `op_iteration` (0 is
    before the first step), `op_module` (index), `op_recompute`, and `op_node`: the operation of the StepGraph that runs
    here, or runs again (-1: none, an operation that a rewrite made up). None where there is no graph.
    """

    birth: np.ndarray
    death: np.ndarray
    nbytes: np.ndarray
    category: np.ndarray
    module: np.ndarray
    source: np.ndarray
    dtype: np.ndarray
    shapes: Sequence[tuple[int, ...]]
    op: np.ndarray
    op_phase: np.ndarray
    op_iteration: np.ndarray
    op_module: np.ndarray
    op_recompute: np.ndarray
    op_names: Sequence[str]
    module_names: Sequence[str]
    source_names: Sequence[str]
    dtype_names: Sequence[str]
    op_node: np.ndarray | None = None
    stream: np.ndarray | None = None

    @property
    def num_ops(self) -> int:
        return len(self.op)

    def lint(self) -> None:
        """Raise ValueError when a column contradicts another."""
        storages, ops = len(self.birth), self.num_ops
        for name in ("death", "nbytes", "category", "module", "source", "dtype", "shapes"):
            if len(getattr(self, name)) != storages:
                raise ValueError(f"column {name} has {len(getattr(self, name))} rows for {storages} storages")
        for name in ("op_phase", "op_iteration", "op_module", "op_recompute"):
            if len(getattr(self, name)) != ops:
                raise ValueError(f"column {name} has {len(getattr(self, name))} rows for {ops} operations")
        if self.stream is not None and len(self.stream) != storages:
            raise ValueError(f"column stream has {len(self.stream)} rows for {storages} storages")
        if self.op_node is not None and len(self.op_node) != ops:
            raise ValueError(f"column op_node has {len(self.op_node)} rows for {ops} operations")
        if storages and not ((self.birth >= 0) & (self.birth <= self.death) & (self.death <= ops + 1)).all():
            raise ValueError("a storage is not born before it dies, within the step")
        if storages and (self.nbytes < 0).any():
            raise ValueError("a storage has a negative size")

    def live_bytes(self, *, rounded: bool = False, without: Sequence[Category] = ()) -> np.ndarray:
        """Bytes alive during each operation, shape [number of operations].

        `rounded` counts allocator blocks of 512 bytes instead of requested bytes; `without` leaves categories out.
        """
        sizes = round_to_blocks(self.nbytes) if rounded else self.nbytes
        keep = ~np.isin(self.category, [int(category) for category in without])
        change = np.zeros(self.num_ops + 2, dtype=np.int64)
        np.add.at(change, self.birth[keep], sizes[keep])
        np.subtract.at(change, self.death[keep], sizes[keep])
        return np.cumsum(change)[: self.num_ops]

    def peak_index(self) -> int:
        """The operation at which the requested bytes are largest; of equal ones the first of the last iteration."""
        live = self.live_bytes()
        highest = np.flatnonzero(live == live.max())
        return int(highest[np.argmax(self.op_iteration[highest])])

    def instant(self, index: int) -> Instant:
        return Instant(
            index=index,
            iteration=int(self.op_iteration[index]),
            phase=Phase(int(self.op_phase[index])).label,
            op=self.op_names[self.op[index]],
            module=self.module_names[self.op_module[index]],
            recompute=bool(self.op_recompute[index]),
        )

    def alive(self, index: int) -> np.ndarray:
        """Indices of the storages alive during operation `index`."""
        return np.flatnonzero((self.birth <= index) & (index < self.death))

    def breakdown(self, index: int) -> dict[Category, int]:
        """Requested bytes by category during operation `index`; the values sum to its live bytes."""
        alive = self.alive(index)
        totals = np.zeros(len(Category), dtype=np.int64)
        np.add.at(totals, self.category[alive], self.nbytes[alive])
        return {category: int(totals[category]) for category in Category}

    def by_module(self, index: int) -> dict[str, dict[Category, int]]:
        """Requested bytes by owner module and category during operation `index`."""
        table: dict[str, dict[Category, int]] = {}
        for storage in self.alive(index):
            row = table.setdefault(self.module_names[self.module[storage]], {})
            category = Category(int(self.category[storage]))
            row[category] = row.get(category, 0) + int(self.nbytes[storage])
        return table

    def largest(self, index: int, count: int = 10) -> list[LiveTensor]:
        """The `count` largest storages alive during operation `index`, largest first."""
        alive = self.alive(index)
        order = alive[np.argsort(-self.nbytes[alive], kind="stable")][:count]
        return [self.tensor(storage) for storage in order]

    def tensor(self, storage: int) -> LiveTensor:
        """The storage of that row."""
        birth = int(self.birth[storage])
        source = int(self.source[storage])
        return LiveTensor(
            nbytes=int(self.nbytes[storage]),
            shape=tuple(self.shapes[storage]),
            dtype=self.dtype_names[self.dtype[storage]],
            category=Category(int(self.category[storage])).name.lower(),
            module=self.module_names[self.module[storage]],
            born_phase=Phase(int(self.op_phase[birth])).label,
            born_iteration=int(self.op_iteration[birth]),
            source_line=self.source_names[source] if source >= 0 else None,
        )

    def phases(self) -> list[PhasePeak]:
        """Peak and end of every phase in order of time. Traced storages only: kernel workspaces are left out."""
        live = self.live_bytes(without=[Category.WORKSPACE])
        key = self.op_iteration.astype(np.int64) * len(Phase) + self.op_phase
        starts = np.flatnonzero(np.diff(key, prepend=-1))
        ends = np.append(starts[1:], self.num_ops)
        return [
            PhasePeak(
                iteration=int(self.op_iteration[start]),
                phase=Phase(int(self.op_phase[start])).label,
                peak_bytes=int(live[start:end].max()),
                end_bytes=self.bytes_before(end),
            )
            for start, end in zip(starts, ends)
        ]

    def until(self, index: int) -> Liveness:
        """The first `index` operations, with what is born by then; what dies later outlives them."""
        kept = np.flatnonzero(self.birth < index)
        operations = ("op", "op_phase", "op_iteration", "op_module", "op_recompute", "op_node")
        return replace(
            self,
            birth=self.birth[kept],
            **self.of_rows(kept),
            **{name: None if getattr(self, name) is None else getattr(self, name)[:index] for name in operations},
            death=np.minimum(self.death[kept], index + 1),
            shapes=[self.shapes[row] for row in kept],
        )

    def of_rows(self, rows: np.ndarray) -> dict[str, np.ndarray | None]:
        """The columns of these storages that a copy of them shares: all but birth, death and shapes."""
        columns = {name: getattr(self, name) for name in ("nbytes", "category", "module", "source", "dtype", "stream")}
        return {name: None if column is None else column[rows] for name, column in columns.items()}

    def steady_bytes(self) -> int:
        """Traced bytes between steps: what is left after the last training step's garbage is freed."""
        return self.bytes_before(self.training_ops)

    @property
    def training_ops(self) -> int:
        """Operations of loading and training; what comes after them is evaluation, generation and saving."""
        return int(np.searchsorted(self.op_phase > Phase.OPTIMIZER, True))

    def bytes_before(self, index: int) -> int:
        """Traced bytes alive after operation index - 1 and its frees, before operation `index` allocates."""
        kept = (self.birth < index) & (self.death > index) & (self.category != Category.WORKSPACE)
        return int(self.nbytes[kept].sum())

    def with_storages(self, *, birth, death, nbytes, category: Category, module, shapes, dtype: str) -> Liveness:
        """This liveness with more storages of one category (kernel workspaces, communication buffers)."""
        count = len(birth)
        names = list(self.dtype_names)
        if dtype not in names:
            names.append(dtype)

        def extend(column, values):
            return np.concatenate([column, np.asarray(values, dtype=column.dtype)])

        return replace(
            self,
            birth=extend(self.birth, birth),
            death=extend(self.death, death),
            nbytes=extend(self.nbytes, nbytes),
            category=extend(self.category, [int(category)] * count),
            module=extend(self.module, module),
            source=extend(self.source, [-1] * count),
            dtype=extend(self.dtype, [names.index(dtype)] * count),
            stream=None if self.stream is None else extend(self.stream, [0] * count),
            shapes=[*self.shapes, *shapes],
            dtype_names=names,
        )
