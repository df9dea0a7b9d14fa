"""What FSDP2 does to a recorded step, before any byte is counted: units, their parameters, and the order of events.

What it changes: nothing; fsdp2_rewrite.py carries out the plan.
Where it comes from: parameters, gradients and calls of modules are those of the trace; which hook runs when is that of
torch/distributed/fsdp/_fully_shard/_fsdp_state.py.
Not modelled: what fsdp2_rewrite.py lists, and this file refuses.
Sources: as there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from metapeak.tracer.errors import InputError
from metapeak.tracer.graph import StepGraph, Value
from metapeak.tracer.liveness import Category, Liveness, Phase

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """One rank of `world_size`. `reshard_after_forward` as of fully_shard: None is True for all units but the root.

    `orig_dtype` and `reduce_dtype`: see Note [Mixed precision]; None is the dtype of the trace.
    """

    world_size: int
    rank: int
    reshard_after_forward: bool | None = None
    orig_dtype: str | None = None
    reduce_dtype: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of `shape`, at `row` of the storages; `nbytes_each` is the size of an element where it is used."""

    row: int
    shape: tuple[int, ...]
    nbytes_each: int
    trainable: bool

    def padded_numel(self, world_size: int) -> int:
        """Elements of every rank's shard, padded to the largest."""
        return -(-self.shape[0] // world_size) * math.prod(self.shape[1:])

    def local_numel(self, world_size: int, rank: int) -> int:
        """Elements of this rank's shard that are the parameter's."""
        chunk = -(-self.shape[0] // world_size)
        return max(0, min(chunk, self.shape[0] - rank * chunk)) * math.prod(self.shape[1:])


@dataclass(kw_only=True, eq=False)
class Unit:
    """A module under fully_shard with the parameters that no unit inside it holds, and what it holds at the moment."""

    module: int
    is_root: bool
    parameters: list[Parameter]
    gradients: dict[int, list[int]]  # iteration -> storages of the plain step
    reshards: bool
    unsharded: list[int] = field(default_factory=list)
    gathered: int | None = None  # the all-gather's buffer, before the copy-out
    pending: bool = False  # an all-gather was issued that nobody waited for
    was_gathered: bool = False
    place: int = -1  # in the order of forwards


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that FSDP does before the plain step's operation `at`."""

    at: int
    what: str
    unit: Unit
    iteration: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What there is to do for one rank. Made by `of`, which raises InputError for what is not rewritten."""

    units: list[Unit]  # root first
    events: list[Event]
    optimizer_rows: dict[int, Parameter]  # storages born in the optimizer's phase -> whose shard they are like
    seeds: list[int]  # gradients that backwards start from: the call holds them until its final callback has run

    @classmethod
    def of(cls, liveness: Liveness, graph: StepGraph, names: tuple[str, ...], sharding: Sharding) -> Plan:
        if graph.saved is None:
            raise InputError("FSDP2 is rewritten on a step recorded with decouple_saves.")
        if not 0 <= sharding.rank < sharding.world_size:
            raise InputError(f"rank {sharding.rank} is not one of {sharding.world_size} ranks.")
        parameters = _parameters(graph)
        owners = _units_of(graph, names, parameters)
        gradients = _gradients(graph, parameters)
        trainable = {row for rows in gradients.values() for row in rows}
        units = []
        for name in ("", *names):
            mine = [row for row in parameters if owners[row] == name]
            reshard = sharding.reshard_after_forward
            units.append(
                Unit(
                    module=graph.module_names.index(name),
                    is_root=name == "",
                    parameters=[
                        Parameter(
                            row=row,
                            shape=parameters[row][1],
                            nbytes_each=_element_bytes(graph, row),
                            trainable=row in trainable,
                        )
                        for row in mine
                    ],
                    gradients={
                        iteration: [gradient for row, gradient in rows.items() if row in set(mine)]
                        for iteration, rows in gradients.items()
                    },
                    reshards=(name != "") if reshard is None else reshard,
                )
            )
        _check_inputs(graph, units, sharding.orig_dtype is not None)
        by_row = {parameter.row: parameter for unit in units for parameter in unit.parameters}
        return cls(
            units=units,
            events=_events(liveness, graph, units),
            optimizer_rows=_optimizer_rows(graph, by_row, gradients),
            seeds=_seeds(liveness),
        )


def _parameters(graph: StepGraph) -> dict[int, tuple[list[str], tuple[int, ...]]]:
    """Storage row -> (names, shape) of the parameters that were loaded."""
    found: dict[int, tuple[list[str], tuple[int, ...]]] = {}
    values = {node: value for value, node in enumerate(graph.value_node) if node in graph.load_names}
    for node, name in graph.load_names.items():
        value = values[node]
        row = graph.value_storage[value]
        if graph.category[row] != Category.PARAMETER:
            continue
        shape = graph.value_shape[value]
        if not shape:
            raise InputError(f"fully_shard cannot shard the scalar parameter {name!r}.")
        found.setdefault(row, ([], shape))[0].append(name)
    return found


def _element_bytes(graph: StepGraph, row: int) -> int:
    name = graph.dtype_names[graph.value_dtype[graph.storage_value[row]]]
    if name not in ITEMSIZE:
        raise InputError(f"FSDP2 is rewritten for floating-point parameters only, not for {name}.")
    return ITEMSIZE[name]


def _units_of(graph: StepGraph, names: tuple[str, ...], parameters) -> dict[int, str]:
    """Storage row of each parameter -> the innermost unit that holds it, "" for the root."""
    for name in names:
        if name not in graph.module_names:
            raise InputError(f"The model has no module {name!r}.")
    owners = {}
    for row, (paths, _) in parameters.items():
        holders = {max((name for name in names if path.startswith(name + ".")), key=len, default="") for path in paths}
        if len(holders) > 1:
            raise InputError(
                f"{' and '.join(paths)} are one parameter in different units; fully_shard wants them in the same one."
            )
        owners[row] = holders.pop()
    return owners


def _gradients(graph: StepGraph, parameters) -> dict[int, dict[int, int]]:
    """iteration -> {storage row of a parameter: row of its gradient}."""
    found: dict[int, dict[int, int]] = {}
    by_place: dict[tuple[int, int], list[int]] = {}
    for row in parameters:
        by_place.setdefault((graph.owner[row], graph.nbytes[row]), []).append(row)
    for row, category in enumerate(graph.category):
        if category != Category.GRADIENT:
            continue
        rows = by_place.get((graph.owner[row], graph.nbytes[row]), [])
        of_iteration = found.setdefault(graph.iteration[graph.birth[row]], {})
        free = [parameter for parameter in rows if parameter not in of_iteration]
        if not free:
            raise InputError(
                f"A gradient in {graph.module_names[graph.owner[row]]!r} is of no parameter there: gradient "
                "accumulation and main gradients are not rewritten for FSDP2."
            )
        of_iteration[free[0]] = row
    if len({frozenset(rows) for rows in found.values()}) > 1:
        raise InputError("Iterations do not have gradients of the same parameters.")
    for rows in by_place.values():
        if len({row in next(iter(found.values()), {}) for row in rows}) > 1:
            raise InputError("Frozen and trainable parameters of one size in one module cannot be told apart.")
    return found


def _optimizer_rows(graph: StepGraph, parameters: dict[int, Parameter], gradients) -> dict[int, Parameter]:
    """Storages born in the optimizer's phase, each with the parameter whose shape it has.

    An operator's results are like its first list of tensors, one by one, or like its first tensor.
    """
    like = dict(parameters)
    for rows in gradients.values():
        like |= {gradient: parameters[row] for row, gradient in rows.items()}
    found = {}
    for value, node in enumerate(graph.value_node):
        row = graph.value_storage[value]
        if graph.phase[node] != Phase.OPTIMIZER or graph.birth[row] != node or row in found:
            continue
        source = _source_of(graph.args[node], graph.value_output[value])
        parameter = like.get(graph.value_storage[source]) if source is not None else None
        if parameter is None or graph.value_shape[value] != parameter.shape:
            if graph.nbytes[row] == 0:
                continue
            raise InputError(
                f"The optimizer's {graph.op_names[graph.op[node]]} makes a tensor of shape "
                f"{list(graph.value_shape[value])} that is like no parameter: FSDP2 is not rewritten for it."
            )
        found[row] = like[row] = parameter
    return found


def _source_of(arguments, position: int) -> Value | None:
    for argument in arguments:
        if type(argument) is Value:
            return argument
        if type(argument) in (list, tuple) and argument and all(type(item) is Value for item in argument):
            return argument[position] if position < len(argument) else None
    return None


# -- when FSDP acts ----------------------------------------------------------------------------------------------------


def _events(liveness: Liveness, graph: StepGraph, units: list[Unit]) -> list[Event]:
    """What FSDP does, in order, in all iterations."""
    events: list[Event] = []
    position = _positions(liveness, graph)
    spans = _forward_spans(graph, units)
    for iteration in sorted({number for number in graph.iteration if number}):
        mine = [(unit, *spans[unit.module][iteration]) for unit in units]
        forward = []
        for order, (unit, begin, end) in enumerate(mine):
            event = Event(at=int(position[begin]), what="pre_forward", unit=unit, iteration=iteration)
            forward.append(((event.at, 1, order), event))
            event = Event(at=int(position[end - 1]) + 1, what="post_forward", unit=unit, iteration=iteration)
            forward.append(((event.at, 0, -order), event))
        events += [event for _, event in sorted(forward, key=lambda pair: pair[0])]
        events += _backward_events(liveness, graph, mine, iteration)
    return events


def _positions(liveness: Liveness, graph: StepGraph) -> np.ndarray:
    """For each operation of the graph where it runs for the first time."""
    position = np.full(graph.num_ops, -1, dtype=np.int64)
    first = np.flatnonzero((liveness.op_node >= 0) & ~liveness.op_recompute)
    position[liveness.op_node[first]] = first
    again = np.flatnonzero((liveness.op_node >= 0) & liveness.op_recompute)
    missing = again[position[liveness.op_node[again]] < 0]
    position[liveness.op_node[missing]] = missing
    return position


def _forward_spans(graph: StepGraph, units: list[Unit]) -> dict[int, dict[int, tuple[int, int]]]:
    """module -> iteration -> (first operation, operation after the last) of its one call."""
    wanted = {unit.module for unit in units}
    found: dict[int, dict[int, tuple[int, int]]] = {module: {} for module in wanted}
    for module, (begin, end) in zip(graph.saved.call_module, graph.saved.call_ops):
        if module not in wanted:
            continue
        iteration = graph.iteration[begin]
        if iteration in found[module]:
            raise InputError(
                f"{graph.module_names[module] or 'The model'!r} is called more than once a step: FSDP2 is not "
                "rewritten for that, nor for gradient accumulation."
            )
        found[module][iteration] = (begin, end)
    iterations = {number for number in graph.iteration if number}
    for module, spans in found.items():
        if set(spans) != iterations:
            raise InputError(f"{graph.module_names[module]!r} is not called in every step: FSDP2 is not rewritten.")
    return found


def _check_inputs(graph: StepGraph, units: list[Unit], param_is_cast: bool) -> None:
    """Raise InputError where what a unit is given changes what FSDP does in a way that is not rewritten.

    The gradient of an input that several units get is added up after their post-backward hooks, not before; and
    `cast_forward_inputs` copies inputs of another floating dtype than param_dtype.
    """
    differentiated = set(graph.saved.backward_of)
    blocks = {unit.module: unit for unit in units if not unit.is_root}
    holders: dict[int, set[int]] = {}
    for module, inputs in zip(graph.saved.call_module, graph.saved.call_inputs):
        if module not in blocks:
            continue
        compute = blocks[module].parameters[0].row if blocks[module].parameters else None
        for row in inputs:
            holders.setdefault(row, set()).add(module)
            dtype = graph.value_dtype[graph.storage_value[row]]
            if (
                param_is_cast
                and compute is not None
                and graph.dtype_names[dtype] in ITEMSIZE
                and dtype != graph.value_dtype[graph.storage_value[compute]]
            ):
                raise InputError(
                    f"{graph.module_names[module]!r} is given a tensor in {graph.dtype_names[dtype]}, which mixed "
                    "precision casts: FSDP2 is not rewritten for that."
                )
    for row, modules in holders.items():
        if len(modules) > 1 and graph.birth[row] in differentiated:
            names = ", ".join(sorted(graph.module_names[module] for module in modules)[:3])
            raise InputError(
                f"Several units ({names}, ...) get one tensor with a gradient: FSDP2 is not rewritten for that."
            )


def _seeds(liveness: Liveness) -> list[int]:
    backward = np.flatnonzero(liveness.op_phase == Phase.BACKWARD)
    starts = backward[np.flatnonzero(np.diff(backward, prepend=-2) > 1)]
    return np.flatnonzero(np.isin(liveness.birth, starts)).tolist()


def _backward_events(liveness: Liveness, graph: StepGraph, spans, iteration: int) -> list[Event]:
    """Pre-backward hooks run before a unit's first backward operation (or recompute), post-backward after its last.

    A unit none of whose inputs requires a gradient has no post-backward hook; the root's final callback does it.
    """
    indices = np.flatnonzero((liveness.op_phase == Phase.BACKWARD) & (liveness.op_iteration == iteration))
    nodes = liveness.op_node[indices]
    backward_of = np.where(nodes >= 0, np.asarray(graph.saved.backward_of)[nodes], -1)
    forward = np.where(liveness.op_recompute[indices], nodes, backward_of)
    known = np.flatnonzero(forward >= 0)
    events, late = [], []
    for order, (unit, begin, end) in enumerate(spans):
        inside = np.flatnonzero((begin <= forward) & (forward < end))
        if not len(inside):
            raise InputError(f"{graph.module_names[unit.module]!r} has no backward: FSDP2 is not rewritten for it.")
        event = Event(at=int(indices[inside[0]]), what="pre_backward", unit=unit, iteration=iteration)
        events.append(((event.at, 1, order), event))
        before = (forward >= 0) & (forward < begin)
        if unit.is_root or not before.any():
            late.append(unit)
            continue
        after = known[np.searchsorted(known, inside[-1], side="right") :]
        last = after[0] if len(after) else inside[-1] + 1
        event = Event(at=int(indices[last - 1]) + 1, what="post_backward", unit=unit, iteration=iteration)
        events.append(((event.at, 0, order), event))
    ordered = [event for _, event in sorted(events, key=lambda pair: pair[0])]
    end = int(indices[-1])  # the loop's loss.detach()
    ordered += [Event(at=end, what="post_backward", unit=unit, iteration=iteration) for unit in late]
    ordered.append(Event(at=end, what="finish_backward", unit=spans[0][0], iteration=iteration))
    return ordered
