"""Splicing: the recorded step of a deep model from that of a shorter one, row by row.

A model of a hundred equal blocks does a hundred times the same. So a shorter model is recorded, in which the blocks
occur often enough to see what repeats, and one group of them is copied until the model is as deep as it should be: its
operations in every pass over the blocks (forward, backward, optimizer), what they make, and when that dies. The result
is a StepGraph like any other.

Note [What is checked]
    A group is copied only if the next groups are its copies already: every column of their rows is compared, and what a
    row refers to (an argument, a death) has to be the same thing for both, or lie as far from one group as from the
    other. Where it is not so, `CannotSplice` is raised, and the whole model has to be recorded. Operations on all
    parameters at once (foreach optimizers, the norm of all gradients) get longer lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from metapeak.tracer.collection import uncollected
from metapeak.tracer.depth.columns import Maps, columns_of, copied
from metapeak.tracer.depth.groups import Groups, groups_of, is_aligned
from metapeak.tracer.depth.repeats import NONE, Repeats
from metapeak.tracer.depth.table import LOST, CannotSplice, Table
from metapeak.tracer.graph import SavedTensors, StepGraph, values_in

# Operators whose result grows with the list that they are given.
_GROWING = frozenset({"aten.stack.default", "aten.cat.default"})


def splice(graph: StepGraph, repeats: Repeats) -> StepGraph:
    """The step of the model with `repeats.added` more copies of the template group. Raises CannotSplice."""
    if graph.actions:
        raise CannotSplice("pipelines are recorded whole")
    with uncollected():
        return _Splice(graph, repeats).result()


class _Splice:
    """The work on one graph. New groups are numbered as the deep model has them: those above the template move up."""

    def __init__(self, graph: StepGraph, repeats: Repeats):
        self.graph, self.repeats = graph, repeats
        self.groups: Groups = groups_of(graph, repeats)
        self.template, self.added = repeats.template, repeats.added
        self.tables = {name: Table(*columns) for name, columns in self.groups.by_table(graph).items()}
        present = sorted({group for table in self.tables.values() for group in table.rows} - {NONE})
        # (new group, the group whose rows it has), and the rows that belong to no group.
        self.sources = [(NONE, NONE)] + [(group, group) for group in present if group <= self.template]
        self.sources += [(self.template + copy, self.template) for copy in range(1, self.added + 1)]
        self.sources += [(group + self.added, group) for group in present if group > self.template]
        self.columns = columns_of(graph, self.groups, repeats)
        self._absolute: dict[str, np.ndarray] = {}

    def result(self) -> StepGraph:
        for further in range(1, self.repeats.checked + 1):
            self._compare(further)
        self._lay_out()
        return self._emitted()

    # -- comparing ---------------------------------------------------------------------------------------------------

    def _compare(self, further: int) -> None:
        """Raise CannotSplice where the group `further` above the template is not a copy of it."""
        ops = self.graph.num_ops
        shifted = {name: self._shift(table, further) for name, table in self.tables.items()}
        to_neighbour = Maps(shifted, (ops, ops))
        for name, columns in self.columns.items():
            rows, others = (self.tables[name].rows_of(self.template + by).tolist() for by in (0, further))
            if len(rows) != len(others):
                raise CannotSplice(f"neighbouring blocks have {len(rows)} and {len(others)} {name}")
            for title, kind, column in columns:
                for row, other in zip(rows, others):
                    if to_neighbour.translated(kind, column[row]) != column[other]:
                        raise CannotSplice(f"{title} of {self._describe(name, row)} and {self._describe(name, other)}")

    def _shift(self, table: Table, further: int) -> np.ndarray:
        """For every row what takes its place for a group `further` groups above the template."""
        shifted = np.arange(len(table.group))
        for group, rows in table.rows.items():
            if group != NONE and abs(group - self.template) <= self.repeats.reach:
                shifted[rows] = table.counterparts(group, group + further)
        return shifted

    def _describe(self, name: str, row: int) -> str:
        graph = self.graph
        if name not in ("ops", "values", "storages"):
            return f"{name} {row}"
        op = row if name == "ops" else (graph.value_node if name == "values" else graph.birth)[row]
        return f"{name} {row} ({graph.op_names[graph.op[op]]}, {graph.module_names[graph.module[op]]})"

    # -- laying out --------------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        graph, tables, saved = self.graph, self.tables, self.graph.saved
        tables["modules"].put(self._expanded(self.groups.modules.tolist(), upwards=True))
        tables["ops"].put(self._expanded(self.groups.ops.tolist()))
        self.lists = {op: _pairs(self._expanded(places)) for op, places in self.groups.positions.items()}
        nodes = np.asarray(graph.value_node, dtype=np.int64)
        self._lay_out_by(
            "values", lambda group, rows, maps: (maps.rows["ops"][nodes[rows]], self._outputs(group, rows))
        )
        # Rows of storages are in the order in which they were made; their first value may be younger (`out=`).
        first = np.asarray(graph.storage_value, dtype=np.int64)
        made = np.minimum.accumulate(first[::-1])[::-1]
        self._lay_out_by("storages", lambda group, rows, maps: (maps.rows["values"][made[rows]], rows))
        if saved is not None:
            tables["ticks"].put(self._expanded(self.tables["ticks"].group.tolist()))
            self._lay_out_by("saves", _by_tick(saved.packed_tick))
            self._lay_out_by("calls", _by_tick([begin for begin, _ in saved.call_ticks]))
            self._lay_out_by("ghosts", _by_tick([saved.unpacked_tick[save] for save, *_ in saved.ghosts]))
            self._lay_out_by("cast_reuses", _by_tick([tick for *_, tick in saved.cast_reuses]))
            casts = np.asarray(saved.casts, dtype=np.int64)
            self._lay_out_by("casts", lambda group, rows, maps: (maps.rows["storages"][casts[rows]],))

    def _expanded(self, groups: Sequence[int], upwards: bool | None = None) -> list[tuple[int, np.ndarray]]:
        """Rows in their new order, as stretches (new group, rows): copies lie beside the template.

        The template's neighbours tell the way of a pass, if `upwards` does not.
        """
        runs, begin = [], 0
        for group, run in groupby(groups):
            end = begin + sum(1 for _ in run)
            runs.append((group, np.arange(begin, end)))
            begin = end
        stretches: list[tuple[int, np.ndarray]] = []
        for at, (group, rows) in enumerate(runs):
            if group != self.template:
                stretches.append((group + self.added if group != NONE and group > self.template else group, rows))
                continue
            before, after = (runs[by][0] if 0 <= by < len(runs) else NONE for by in (at - 1, at + 1))
            way = {before - group: -1, after - group: 1}
            if upwards is None and way not in ({-1: -1, 1: 1}, {1: -1, -1: 1}):
                raise CannotSplice("a pass over the blocks does not go from one to the next")
            up = way.get(1) == 1 if upwards is None else upwards
            copies = range(self.added + 1) if up else range(self.added, -1, -1)
            stretches += [(group + copy, rows) for copy in copies]
        return stretches

    def _lay_out_by(self, name: str, key: Callable[[int, np.ndarray, Maps], tuple[np.ndarray, ...]]) -> None:
        """Place the rows of a table in the order of their keys, the first one first."""
        table = self.tables[name]
        parts = [(group, table.rows[source]) for group, source in self.sources if source in table.rows]
        table.sort(parts, [key(group, rows, self.maps_of(group)) for group, rows in parts])

    def _outputs(self, group: int, rows: np.ndarray) -> np.ndarray:
        """Which result of its operation each value is."""
        graph, outputs = self.graph, []
        for value in rows.tolist():
            output, op = graph.value_output[value], graph.value_node[value]
            if op in self.lists and self._is_aligned(op):
                before, pairs = len(self.groups.positions[op]), self.lists[op]
                output = output // before * len(pairs) + pairs[group, output % before]
            outputs.append(output)
        return np.asarray(outputs, dtype=np.int64)

    def _is_aligned(self, op: int) -> bool:
        return is_aligned(self.graph, self.groups.outputs[op], len(self.groups.positions[op]))

    def maps_of(self, group: int) -> Maps:
        """What the rows of a new group (or NONE) refer to, for the tables that have a new order."""
        rows = {name: self._map(name, group) for name, table in self.tables.items() if table.size is not None}
        return Maps(rows, (self.graph.num_ops, self.tables["ops"].size))

    def _map(self, name: str, group: int) -> np.ndarray:
        table = self.tables[name]
        if name not in self._absolute:
            places = np.full(len(table.group), LOST)
            for new, source in self.sources:
                if source != self.template and source in table.rows:
                    places[table.rows[source]] = table.place[new]
            self._absolute[name] = places
        if group == NONE:
            return self._absolute[name]
        places, source = self._absolute[name].copy(), self._source_of(group)
        for near in range(source - self.repeats.reach, source + self.repeats.reach + 1):
            there = group + near - source
            if near in table.rows and there in table.place:
                places[table.rows[near]] = table.places_of(table.counterparts(near, self._source_of(there)), there)
        return places

    def _source_of(self, group: int) -> int:
        return group if group <= self.template else max(group - self.added, self.template)

    # -- writing -----------------------------------------------------------------------------------------------------

    def _emitted(self) -> StepGraph:
        graph, saved = self.graph, self.graph.saved
        spliced = StepGraph(
            op_names=graph.op_names,
            source_names=graph.source_names,
            dtype_names=graph.dtype_names,
            output_dtypes=graph.output_dtypes,
            host_bytes=graph.host_bytes,  # arrays of an evaluation: nothing of the blocks
            saved=SavedTensors() if saved is not None else None,
        )
        maps = {group: self.maps_of(group) for group, _ in self.sources}
        new: dict[str, list[Any]] = {}
        for name, columns in self.columns.items():
            table = self.tables[name]
            parts = [(table.rows_of(old), table.place_of(group), maps[group]) for group, old in self.sources]
            for column in columns:
                if column[1] != "arguments" and not column[0].startswith("("):
                    new[column[0]] = copied(column, parts, table.size)
        for name, column in new.items():
            if name in vars(spliced) and name not in ("whole", "unsharded"):
                setattr(spliced, name, column)
        spliced.whole = {row for row, inside in enumerate(new["whole"]) if inside}
        spliced.unsharded = {row for row, inside in enumerate(new["unsharded"]) if inside}
        self._put_names(spliced)
        self._put_results(spliced)
        self._put_arguments(spliced, maps)
        if saved is not None:
            self._put_saved(spliced.saved, new, maps[NONE])
        return spliced

    def _further(self, group: int) -> int:
        """By how many groups a new group lies above the one whose rows it has."""
        return group - self._source_of(group) if group != NONE else 0

    def _put_names(self, spliced: StepGraph) -> None:
        graph, renamed, modules, ops = self.graph, self.repeats.renamed, self.tables["modules"], self.tables["ops"]
        spliced.module_names = [""] * modules.size
        for group, source in self.sources:
            by = self._further(group)
            for row, place in zip(modules.rows_of(source).tolist(), modules.place_of(group).tolist()):
                spliced.module_names[place] = renamed(graph.module_names[row], by)
            for row, place in zip(ops.rows_of(source).tolist(), ops.place_of(group).tolist()):
                if row in graph.load_names:
                    spliced.load_names[place] = renamed(graph.load_names[row], by)
        blocks = [self.repeats.group_in(name) for name in graph.block_names]
        for group, rows in self._expanded(blocks, upwards=True):
            spliced.block_names += [renamed(graph.block_names[row], self._further(group)) for row in rows.tolist()]

    def _put_results(self, spliced: StepGraph) -> None:
        values = self.tables["values"]
        spliced.value_output = [0] * values.size
        for group, source in self.sources:
            rows = values.rows_of(source)
            for place, output in zip(values.place_of(group).tolist(), self._outputs(group, rows).tolist()):
                spliced.value_output[place] = output

    def _put_arguments(self, spliced: StepGraph, maps: dict[int, Maps]) -> None:
        """Arguments; operations on the parameters of all groups work on those of the copies, too."""
        graph, ops, grown = self.graph, self.tables["ops"], {}
        spliced.args, spliced.kwargs = [()] * ops.size, [{}] * ops.size
        constant = [next(values_in(pair), None) is None for pair in zip(graph.args, graph.kwargs)]
        for group, source in self.sources:
            own = maps[group]
            for row, place in zip(ops.rows_of(source).tolist(), ops.place_of(group).tolist()):
                if constant[row]:
                    spliced.args[place], spliced.kwargs[place] = graph.args[row], graph.kwargs[row]
                    continue
                spliced.kwargs[place] = own.arguments(graph.kwargs[row])
                if row not in self.lists:
                    spliced.args[place] = own.arguments(graph.args[row])
                else:
                    spliced.args[place] = tuple(self._longer(argument, row, maps) for argument in graph.args[row])
        for op, made in enumerate(self.groups.outputs):
            if grown and not grown.keys().isdisjoint(values_in((graph.args[op], graph.kwargs[op]))):
                grown.update(self._grow_alike(spliced, op, grown, maps[NONE]))
            elif op in self.lists and made and not self._is_aligned(op):
                grown[made[0]] = self._grow(spliced, op, maps[NONE])

    def _longer(self, argument: Any, op: int, maps: dict[int, Maps]) -> Any:
        if type(argument) not in (list, tuple) or len(argument) != len(self.groups.positions[op]):
            return maps[NONE].arguments(argument)
        return type(argument)([maps[group].arguments(argument[place]) for group, place in self.lists[op]])

    def _grow(self, spliced: StepGraph, op: int, absolute: Maps) -> int:
        """The length of the one result of a stack or cat along the first dimension, which is put down."""
        graph, name, made = self.graph, self.graph.op_names[self.graph.op[op]], self.groups.outputs[op]
        if name not in _GROWING or (len(graph.args[op]) > 1 and graph.args[op][1] != 0):
            raise CannotSplice(f"{name} over all blocks, operation {op}, made {len(made)} tensors")
        (value,) = made
        shape, places = graph.value_shape[value], self.groups.positions[op]
        length, further = divmod(shape[0] * len(self.lists[op]), len(places))
        if further:
            raise CannotSplice("tensors of several lengths are put together")
        self._lengthen(spliced, value, length, absolute)
        return length

    def _grow_alike(self, spliced: StepGraph, op: int, grown: dict[int, int], absolute: Maps) -> dict[int, int]:
        """What an operation makes of a tensor that grew: one number, or as many as it was given."""
        graph, name = self.graph, self.graph.op_names[self.graph.op[op]]
        ((shape, length),) = {
            (graph.value_shape[value], grown[value])
            for value in values_in((graph.args[op], graph.kwargs[op]))
            if value in grown
        }
        made = [value for value in self.groups.outputs[op] if graph.value_shape[value]]
        for value in made:
            if graph.value_shape[value] != shape or len(shape) != 1 or self.groups.ops[op] == self.template:
                raise CannotSplice(f"{name} of what grows with the number of blocks")
            self._lengthen(spliced, value, length, absolute)
        return dict.fromkeys(made, length)

    def _lengthen(self, spliced: StepGraph, value: int, length: int, absolute: Maps) -> None:
        graph, storage = self.graph, self.graph.value_storage[value]
        before, *others = graph.value_shape[value]
        if graph.nbytes[storage] % before:
            raise CannotSplice("a tensor of which others hold parts grows")
        spliced.value_shape[absolute.rows["values"][value]] = (length, *others)
        spliced.nbytes[absolute.rows["storages"][storage]] = graph.nbytes[storage] // before * length

    def _put_saved(self, spliced: SavedTensors, new: dict[str, list[Any]], absolute: Maps) -> None:
        saved = self.graph.saved
        for name, column in new.items():
            if name in vars(spliced):
                setattr(spliced, name, column)
                spliced.call_ops = _joined(new, "call_ops", 2)
        spliced.call_ticks = _joined(new, "call_ticks", 2)
        spliced.call_saves = (
            np.searchsorted(new["packed_tick"], spliced.call_ticks).tolist() if new["call_module"] else []
        )
        spliced.ghosts, spliced.cast_reuses = _joined(new, "ghosts", 3), _joined(new, "cast_reuses", 3)
        spliced.losses = [absolute.translated("storages", row) for row in saved.losses]
        spliced.graph_ends = [
            [absolute.translated("instants", ops), absolute.translated("ticks", tick)] for ops, tick in saved.graph_ends
        ]


def _joined(new: dict[str, list[Any]], name: str, width: int) -> list[list[int]]:
    return [list(row) for row in zip(*(new[f"{name}.{at}"] for at in range(width)))]


def _pairs(stretches: Sequence[tuple[int, np.ndarray]]) -> dict[tuple[int, int], int]:
    """The new place of every (new group, old place), in order."""
    pairs = [(group, row) for group, rows in stretches for row in rows.tolist()]
    return {pair: place for place, pair in enumerate(pairs)}


def _by_tick(ticks: Sequence[int]) -> Callable[[int, np.ndarray, Maps], tuple[np.ndarray, ...]]:
    """Rows in the order of these (old) ticks of theirs."""
    column = np.asarray(ticks, dtype=np.int64)

    def key(group: int, rows: np.ndarray, maps: Maps):
        return maps.rows["ticks"][column[rows]], rows

    return key
