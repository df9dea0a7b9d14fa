"""The columns of a recorded step by what their entries refer to, so that one rule translates them all.

Kinds: "plain" (nothing), the names of tables ("ops", "values", "storages", "saves", "modules", "ticks";
negative for none), "instants" (a number of operations, as deaths are), "arguments" (of operations), "sets of storages".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from metapeak.tracer.depth.groups import Groups
from metapeak.tracer.depth.repeats import Repeats
from metapeak.tracer.depth.table import CannotSplice
from metapeak.tracer.graph import SavedTensors, StepGraph, Symbol, Value

# (name, kind, entries)
Column = tuple[str, str, Sequence[Any]]


class Maps:
    """Where rows of one group find what they refer to: by table the index of every row, LOST (negative) for none.

    `instants`: (operations before, operations after), for deaths beyond the last operation.
    """

    def __init__(self, rows: Mapping[str, np.ndarray], instants: tuple[int, int]):
        self.rows, self.instants = rows, instants
        self._lists: dict[str, list[int]] = {}

    def list_of(self, name: str) -> list[int]:
        if name not in self._lists:
            self._lists[name] = self.rows[name].tolist()
        return self._lists[name]

    def translated(self, kind: str, entry: Any) -> Any:
        """One entry of a column of that kind, as the other group's row would have it. Raises CannotSplice."""
        if kind == "plain":
            return entry
        if kind == "arguments":
            return self.arguments(entry)
        if kind == "sets of storages":
            return tuple(sorted(self._row("storages", row) for row in entry))
        if entry < 0:
            return entry
        before, after = self.instants
        if kind == "instants":
            return entry - before + after if entry >= before else self._row("ops", entry)
        return self._row(kind, entry)

    def arguments(self, argument: Any) -> Any:
        """Recorded arguments with other tensors in them; the same object where there is no tensor in it."""
        kind = type(argument)
        if kind is Value:
            return Value(self._row("values", argument))
        if kind is tuple or kind is list:
            rows = self.list_of("values")
            items = [
                item
                if type(item) in _CONSTANT
                else Value(rows[item])
                if type(item) is Value and rows[item] >= 0
                else self.arguments(item)
                for item in argument
            ]
            return kind(items)
        if kind is dict and argument:
            return {name: self.arguments(item) for name, item in argument.items()}
        return argument

    def _row(self, name: str, entry: int) -> int:
        row = self.list_of(name)[entry]
        if row < 0:
            raise CannotSplice(f"{name} {entry} is referred to from outside its block")
        return row


# Types of recorded arguments that hold no tensor.
_CONSTANT = frozenset({int, float, bool, str, Symbol, type(None)})


def columns_of(graph: StepGraph, groups: Groups, repeats: Repeats) -> dict[str, list[Column]]:
    """All columns of a graph by table. Those whose name is in parentheses are compared and not copied."""
    paths = [repeats.without_place(name) for name in graph.module_names]
    loads = [repeats.without_place(graph.load_names.get(op, "")) for op in range(graph.num_ops)]
    storages = range(len(graph.birth))
    tables: dict[str, list[Column]] = {
        "modules": [("module_classes", "plain", graph.module_classes), ("(path)", "plain", paths)],
        "ops": [
            *((name, "plain", getattr(graph, name)) for name in ("op", "phase", "iteration", "source", "recompute")),
            ("module", "modules", graph.module),
            ("(name)", "plain", loads),
            ("args", "arguments", graph.args),
            ("kwargs", "arguments", graph.kwargs),
        ],
        "values": [
            *((f"value_{name}", "plain", getattr(graph, f"value_{name}")) for name in _OF_VALUES),
            ("(result)", "plain", groups.results),
            ("value_node", "ops", graph.value_node),
            ("value_storage", "storages", graph.value_storage),
        ],
        "storages": [
            ("nbytes", "plain", graph.nbytes),
            ("category", "plain", graph.category),
            ("stream", "plain", graph.stream),
            ("whole", "plain", [row in graph.whole for row in storages]),
            ("unsharded", "plain", [row in graph.unsharded for row in storages]),
            ("birth", "ops", graph.birth),
            ("death", "instants", graph.death),
            ("owner", "modules", graph.owner),
            ("storage_value", "values", graph.storage_value),
        ],
    }
    if graph.saved is not None:
        _add_saved(tables, graph.saved)
    return tables


_OF_VALUES = ("dtype", "shape", "stride", "offset")


def _add_saved(tables: dict[str, list[Column]], saved: SavedTensors) -> None:
    tables["ops"] += [("backward_of", "ops", saved.backward_of), ("op_tick", "ticks", saved.op_tick)]
    tables["storages"] += [
        ("eager_death", "instants", saved.eager_death),
        ("eager_death_tick", "ticks", saved.eager_death_tick),
    ]
    tables["saves"] = [("value", "values", saved.value)]
    for event in ("packed", "unpacked", "released"):
        tables["saves"].append((event, "instants", getattr(saved, event)))
        tables["saves"].append((f"{event}_tick", "ticks", getattr(saved, f"{event}_tick")))
    tables["calls"] = [
        ("call_module", "modules", saved.call_module),
        ("call_ops.0", "instants", [first for first, _ in saved.call_ops]),
        ("call_ops.1", "instants", [end for _, end in saved.call_ops]),
        ("call_ticks.0", "ticks", [begin for begin, _ in saved.call_ticks]),
        ("call_ticks.1", "ticks", [end for _, end in saved.call_ticks]),
        ("call_inputs", "sets of storages", saved.call_inputs),
        ("call_keywords", "sets of storages", saved.call_keywords),
    ]
    tables["ghosts"] = _split("ghosts", ("saves", "instants", "ticks"), saved.ghosts)
    tables["cast_reuses"] = _split("cast_reuses", ("storages", "instants", "ticks"), saved.cast_reuses)
    tables["casts"] = [("casts", "storages", saved.casts)]


def _split(name: str, kinds: Sequence[str], rows: Sequence[Sequence[int]]) -> list[Column]:
    return [(f"{name}.{at}", kind, [row[at] for row in rows]) for at, kind in enumerate(kinds)]


def copied(column: Column, parts: Sequence[tuple[np.ndarray, np.ndarray, Maps]], size: int) -> list[Any]:
    """A column with copies: entries of (rows, their new places, what they refer to). Raises CannotSplice."""
    _, kind, entries = column
    if kind in ("plain", "sets of storages"):
        result: list[Any] = [None] * size
        for rows, places, maps in parts:
            for row, place in zip(rows.tolist(), places.tolist()):
                entry = entries[row]
                result[place] = entry if kind == "plain" else maps.translated(kind, entry)
        return result
    whole, new = np.asarray(entries, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for rows, places, maps in parts:
        old = whole[rows]
        before, after = maps.instants
        known = (old >= 0) & (old < before) if kind == "instants" else old >= 0
        found = maps.rows["ops" if kind == "instants" else kind][np.where(known, old, 0)] if len(old) else old
        if np.any(known & (found < 0)):
            raise CannotSplice(f"{column[0]} refers to a block from outside it")
        beyond = old - before + after if kind == "instants" else old
        new[places] = np.where(known, found, np.where(old < 0, old, beyond))
    return new.tolist()
