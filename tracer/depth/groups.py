"""Which group of repeated blocks every row of a recorded step belongs to.

Operations carry the module that ran them, and backward operations that of their forward. What carries none (the sum of
two gradients, FSDP's prefetches) belongs to the group during which it ran: over a pass upwards a group begins with the
first operation that names it and ends where a higher one begins, downwards likewise. Operations of an optimizer belong
to the group of the parameters that they work on; one on the parameters of several groups at once belongs to none, and
the tensors that it makes to the groups of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from metapeak.tracer.depth.repeats import NONE, Repeats
from metapeak.tracer.depth.table import places_in
from metapeak.tracer.graph import SavedTensors, StepGraph, Value, values_in
from metapeak.tracer.liveness import Phase


@dataclass(kw_only=True, eq=False)
class Groups:
    """A group for every row: of modules, operations, values, storages, saves, module calls.

    `outputs`: the values that each operation made. `positions`: for operations of no group with lists of tensors, the
    group of each place in those lists. `results`: which result of its operation a value is, leaving out which place.
    """

    modules: np.ndarray
    ops: np.ndarray
    values: np.ndarray
    storages: np.ndarray
    saves: np.ndarray
    calls: np.ndarray
    outputs: list[list[int]]
    results: list[int]
    positions: dict[int, list[int]] = field(default_factory=dict)

    def by_table(self, graph: StepGraph) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """For every table (see columns.py) the groups of its rows, and the parts of those: for operations the pass over
        the blocks, for other rows the operation that made them, by its number in its group.
        """
        nodes, first = np.asarray(graph.value_node, dtype=np.int64), np.asarray(graph.storage_value, dtype=np.int64)
        passes = np.where(self.ops != NONE, _passes(self.ops), 0)
        ops = np.where(self.ops != NONE, (passes << 20) + places_in(self.ops, passes), _OF_ALL + np.arange(len(passes)))
        tables = {
            "modules": (self.modules, np.zeros_like(self.modules)),
            "ops": (self.ops, passes),
            "values": (self.values, ops[nodes]),
            "storages": (self.storages, ops[nodes[first]]),
        }
        saved = graph.saved
        if saved is not None:
            begins = np.asarray([op for op, _ in saved.call_ops], dtype=np.int64)
            tables["saves"] = (self.saves, ops[_during(saved, saved.packed_tick)])
            tables["calls"] = (self.calls, ops[np.minimum(begins, len(ops) - 1)])
            reused = _during(saved, [tick for *_, tick in saved.cast_reuses])
            tables["cast_reuses"] = (self.ops[reused], ops[reused])
            casts = np.asarray(saved.casts, dtype=np.int64)
            tables["casts"] = tuple(column[casts] for column in tables["storages"])
            ghosts = np.asarray([save for save, *_ in saved.ghosts], dtype=np.int64)
            tables["ghosts"] = tuple(column[ghosts] for column in tables["saves"])
            ticks = _ticks(saved, {name: groups for name, (groups, _) in tables.items()})
            before = _during(saved, np.arange(len(ticks)))
            tables["ticks"] = (ticks, np.where(before >= 0, ops[np.maximum(before, 0)], -1))
        return tables


# What an operation on the parameters of several groups names: it ends every pass over the blocks.
ACROSS = NONE + 1
# Where the numbers of operations begin that belong to no group.
_OF_ALL = 1 << 40


def _passes(groups: np.ndarray) -> np.ndarray:
    """For each operation how many stretches of its group came before the one that it lies in."""
    numbers, seen = np.zeros(len(groups), dtype=np.int64), dict.fromkeys(np.unique(groups).tolist(), 0)
    for rows in np.split(np.arange(len(groups)), np.flatnonzero(np.diff(groups)) + 1):
        if len(rows):
            group = int(groups[rows[0]])
            numbers[rows] = seen[group]
            seen[group] += 1
    return numbers


def _during(saved: SavedTensors, ticks: Sequence[int]) -> np.ndarray:
    """The operation before each tick, -1 for none."""
    ops = np.asarray(saved.op_tick, dtype=np.int64)
    return np.searchsorted(ops, np.asarray(ticks, dtype=np.int64), side="right") - 1


def _ticks(saved: SavedTensors, tables: dict[str, np.ndarray]) -> np.ndarray:
    """The group of every tick: that of the operation before it, or if that has none, of the row whose event it is."""
    ops = np.asarray(saved.op_tick, dtype=np.int64)
    events = [(tables["storages"], saved.eager_death_tick)]
    events += [(tables["saves"], column) for column in (saved.packed_tick, saved.unpacked_tick, saved.released_tick)]
    events += [(tables["calls"], [ticks[at] for ticks in saved.call_ticks]) for at in (0, 1)]
    events += [(tables["ghosts"], [tick for *_, tick in saved.ghosts])]
    columns = [(groups, np.asarray(ticks, dtype=np.int64)) for groups, ticks in events]
    last = max([int(ops[-1]), *(int(ticks.max(initial=0)) for _, ticks in columns)])
    last = max([last, *(tick for _, tick in saved.graph_ends)])
    # The event at the very end has a row for everything that is alive then: it belongs to no group.
    lowest, highest = np.full(last + 1, -NONE), np.full(last + 1, NONE)
    for groups, ticks in columns:
        known = ticks >= 0
        np.minimum.at(lowest, ticks[known], groups[known])
        np.maximum.at(highest, ticks[known], groups[known])
    before = _during(saved, np.arange(last + 1))
    during = np.where(before >= 0, tables["ops"][np.maximum(before, 0)], NONE)
    return np.where(during != NONE, during, np.where(lowest == highest, lowest, NONE))


def groups_of(graph: StepGraph, repeats: Repeats) -> Groups:
    """The groups of all rows of a recorded step."""
    modules = np.array([repeats.group_in(name) for name in graph.module_names], dtype=np.int64)
    outputs, results = _outputs_of(graph), list(graph.value_output)
    ops = _filled(graph, _named(graph, modules, outputs), repeats.reach)
    values = np.full(len(graph.value_node), NONE, dtype=np.int64)
    positions: dict[int, list[int]] = {}
    for op, own in enumerate(ops.tolist()):
        made = outputs[op]
        if own != NONE:
            values[made] = own
            continue
        places = _places(graph.args[op], values)
        if places is not None and repeats.template in places:
            positions[op] = places
            if is_aligned(graph, made, len(places)):
                values[made] = [places[graph.value_output[value] % len(places)] for value in made]
                for value in made:
                    results[value] //= len(places)
    storages = values[np.asarray(graph.storage_value, dtype=np.int64)] if graph.storage_value else values[:0]
    saves = calls = ops[:0]
    if graph.saved is not None:
        saves = ops[_during(graph.saved, graph.saved.packed_tick)]
        begins = np.asarray([first for first, _ in graph.saved.call_ops], dtype=np.int64)
        owners = np.asarray(graph.saved.call_module, dtype=np.int64)
        calls = np.where(owners >= 0, modules[owners], NONE)
        calls = np.where(calls == NONE, ops[np.minimum(begins, len(ops) - 1)], calls) if len(begins) else ops[:0]
    return Groups(
        modules=modules,
        ops=ops,
        values=values,
        storages=storages,
        saves=saves,
        calls=calls,
        outputs=outputs,
        results=results,
        positions=positions,
    )


def _outputs_of(graph: StepGraph) -> list[list[int]]:
    """The values that each operation made, in order."""
    outputs: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for value, op in enumerate(graph.value_node):
        outputs[op].append(value)
    return outputs


def is_aligned(graph: StepGraph, made: Sequence[int], places: int) -> bool:
    """Whether an operation on lists of that length made a tensor (or several) for each place of them."""
    return bool(made) and max(graph.value_output[value] for value in made) % places == places - 1 and len(made) > 1


def _places(args: Sequence, values: Sequence[int]) -> list[int] | None:
    """The groups of the tensors of the first list among the arguments in which there is any of a group."""
    for argument in args:
        if type(argument) in (list, tuple):
            found = [int(values[item]) if type(item) is Value else NONE for item in argument]
            if any(group != NONE for group in found):
                return found
    return None


def _named(graph: StepGraph, modules: np.ndarray, outputs: list[list[int]]) -> list[int]:
    """For each operation the group that it names, NONE where it names none."""
    named: list[int] = []
    values: list[int] = [NONE] * len(graph.value_node)
    own_groups = modules.tolist()
    for op, module in enumerate(graph.module):
        own, made = own_groups[module], outputs[op]
        places = None
        if own == NONE and module == 0 and graph.phase[op] != Phase.BACKWARD:
            groups = {values[value] for value in values_in((graph.args[op], graph.kwargs[op]))} - {NONE}
            if not groups:
                groups = {own_groups[graph.owner[graph.value_storage[value]]] for value in made} - {NONE}
            if len(groups) == 1:
                own = groups.pop()
            elif groups:
                places = _places(graph.args[op], values)
        named.append(ACROSS if places is not None else own)
        for value in made:
            storage = graph.value_storage[value]
            if own != NONE:
                values[value] = own
            elif places is not None:
                values[value] = places[graph.value_output[value] % len(places)]
            else:
                values[value] = own_groups[graph.owner[storage]]
    return named


def _filled(graph: StepGraph, named: list[int], reach: int) -> np.ndarray:
    """The group of each operation: the one it names, or the one during which it ran."""
    filled = np.full(len(named), NONE, dtype=np.int64)
    begin = 0
    for _, run in groupby(zip(graph.iteration, graph.phase)):
        end = begin + sum(1 for _ in run)
        naming = [op for op in range(begin, end) if named[op] != NONE]
        for sweep in _sweeps(naming, named, reach):
            first, last = sweep[0], sweep[-1]
            upwards = named[last] >= named[first]
            most = np.maximum if upwards else np.minimum
            groups = np.full(last + 1 - first, NONE if upwards else -NONE, dtype=np.int64)
            groups[np.asarray(sweep) - first] = [named[op] for op in sweep]
            filled[first : last + 1] = most.accumulate(groups)
        begin = end
    return filled


def _sweeps(naming: list[int], named: list[int], reach: int) -> Iterator[list[int]]:
    """The operations that name a group, cut where a pass over the blocks ends and the next begins."""
    sweep: list[int] = []
    for op in naming:
        if named[op] == ACROSS or (sweep and abs(named[op] - named[sweep[-1]]) > reach + 1):
            if sweep:
                yield sweep
            sweep = []
        if named[op] != ACROSS:
            sweep.append(op)
    if sweep:
        yield sweep
