"""FSDP2 as a rewrite of a recorded, unsharded step: one rank's timeline without running it again, for sweeps.

What it changes: a unit's parameters become shards, gathered before its forward and its backward and freed after them;
its gradients are reduce-scattered into one buffer after its backward; the optimizer's states and temporaries are those
of the shards.
Where each byte comes from: activations, temporaries and their lifetimes are those of the trace; buffers and the order
of events are those of `fully_shard`, which the oracle (strategies/parallel/fsdp2.py, the real library on the phantom
GPU) runs: equal live bytes at every operation of the model, at the end of every phase, and at the peaks.
Not modelled, and refused: HSDP, resharding to fewer ranks, CPU offload, gradient accumulation, units that are called
more than once or not at all, optimizers whose storages are not of the parameters' shapes, gradient clipping.
Sources: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (unshard, wait_for_unshard, reshard, post_backward,
_backward_prefetch), _fsdp_collectives.py (foreach_all_gather, foreach_all_gather_copy_out, foreach_reduce),
_fsdp_state.py (_post_forward, _pre_backward, _root_post_backward_final_callback).

Note [Mixed precision]
    MixedPrecisionPolicy runs a unit on parameters cast to `param_dtype`, so the trace has to be of the model in that
    dtype; shards and optimizer are of `orig_dtype`, gradients are reduced in `reduce_dtype` (None: in param_dtype).

Note [Two buffers in forward]
    In forward the buffer of an all-gather is kept until the next unit has copied out its own: FSDPCommContext keeps it
    so that copying out can overlap with the next gather, and wait_for_unshard's local variable holds it to its return.
    So both buffers and the next unit's parameters are there at once. In backward a buffer is freed after its copy-out,
    but the next unit's gather is issued before this unit's backward runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from metapeak.tracer.errors import InputError
from metapeak.tracer.graph import StepGraph, Value
from metapeak.tracer.liveness import Category, Liveness, Phase

_ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


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


def sharded(liveness: Liveness, graph: StepGraph, units: Iterable[str], sharding: Sharding) -> Liveness:
    """The liveness of one rank of a step whose units (module paths) and root are under `fully_shard`.

    `liveness` is the unsharded step's, as recorded or with checkpointing (strategies/recompute.py); `graph` was
    recorded with `decouple_saves`. Raises InputError for what this file refuses.
    """
    plan = _Plan.of(liveness, graph, tuple(units), sharding)
    timeline = _Timeline(liveness, plan, sharding)
    for event in plan.events:
        timeline.happen(event)
    result = timeline.finish()
    result.lint()
    return result


# -- what there is to shard --------------------------------------------------------------------------------------------


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
class _Plan:
    units: list[Unit]  # root first
    events: list[Event]
    optimizer_rows: dict[int, Parameter]  # storages born in the optimizer's phase -> whose shard they are like

    @classmethod
    def of(cls, liveness: Liveness, graph: StepGraph, names: tuple[str, ...], sharding: Sharding) -> _Plan:
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
        by_row = {parameter.row: parameter for unit in units for parameter in unit.parameters}
        return cls(
            units=units,
            events=_events(liveness, graph, units),
            optimizer_rows=_optimizer_rows(graph, by_row, gradients),
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
    if name not in _ITEMSIZE:
        raise InputError(f"FSDP2 is rewritten for floating-point parameters only, not for {name}.")
    return _ITEMSIZE[name]


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


# -- what it allocates and frees ---------------------------------------------------------------------------------------


class _Timeline:
    """Adds operations and storages to the plain step, event by event.

    Time is that of the new step: `_now` is the index of the next operation to be added.
    """

    def __init__(self, plain: Liveness, plan: _Plan, sharding: Sharding):
        self._plain, self._plan, self._sharding = plain, plan, sharding
        self._at: list[int] = []
        self._ops: list[tuple[str, int, int, int]] = []  # name, module, iteration, phase
        self._rows: list[list] = []  # birth, death, nbytes, category, module
        self._event: Event | None = None
        self._kept_in_forward: int | None = None  # see Note [Two buffers in forward]
        self._reduced: int | None = None  # the last reduce-scatter's input
        self._order: list[Unit] = []
        self._deaths: dict[int, int] = {}  # plain gradients
        self._ends: list[tuple[int, list[int]]] = []  # (new row, plain gradients that it dies with)

    @property
    def _now(self) -> int:
        return self._event.at + len(self._ops)

    def happen(self, event: Event) -> None:
        self._event = event
        getattr(self, "_" + event.what)(event.unit)

    # -- the hooks of fully_shard --

    def _pre_forward(self, unit: Unit) -> None:
        if unit.is_root:
            self._order.clear()
        self._unshard(unit)
        self._wait(unit, in_forward=True)

    def _post_forward(self, unit: Unit) -> None:
        if unit.reshards:
            self._reshard(unit)
        unit.place = len(self._order)
        self._order.append(unit)
        if unit.is_root:
            self._free_kept()

    def _pre_backward(self, unit: Unit) -> None:
        self._unshard(unit)
        self._wait(unit, in_forward=False)
        if unit.place > 0:
            self._unshard(self._order[unit.place - 1])

    def _post_backward(self, unit: Unit) -> None:
        self._reshard(unit)
        self._free_reduced()
        gradients = unit.gradients.get(self._event.iteration, [])
        trainable = [parameter for parameter in unit.parameters if parameter.trainable]
        if not gradients:
            return
        world, used = self._sharding.world_size, trainable[0].nbytes_each
        total = sum(parameter.padded_numel(world) for parameter in trainable) * world
        original = self._original(trainable[0])
        reduced = _ITEMSIZE[self._sharding.reduce_dtype] if self._sharding.reduce_dtype else used
        self._reduced = self._allocate("aten.empty.memory_format", total * reduced, Category.COMMUNICATION)
        self._run("fsdp.chunk_cat.default")
        for row in gradients:
            self._deaths[row] = self._now
        output = self._allocate("aten.empty.memory_format", total // world * reduced, Category.GRADIENT)
        self._run("c10d._reduce_scatter_base_.default")
        if original != reduced:
            cast = self._allocate("aten._to_copy.default", total // world * original, Category.GRADIENT)
            self._free(output)
            output = cast
        self._ends.append((output, gradients))

    def _finish_backward(self, unit: Unit) -> None:
        self._free_reduced()

    # -- gathering --

    def _unshard(self, unit: Unit) -> None:
        """Issue the all-gather, unless the parameters are there or it was issued already."""
        if unit.unsharded or unit.pending or not unit.parameters:
            return
        unit.pending = True
        world = self._sharding.world_size
        if world == 1:
            return
        numel = sum(parameter.padded_numel(world) for parameter in unit.parameters)
        each = self._uniform(unit)
        flat = None
        if self._is_cast(unit):
            flat = self._allocate("aten.empty.memory_format", numel * each, Category.COMMUNICATION)
            self._run("aten._foreach_copy_.default")
        unit.gathered = self._allocate("aten.empty.memory_format", numel * world * each, Category.COMMUNICATION)
        self._run("fsdp.all_gather_copy_in.default")
        self._run("c10d._allgather_base_.default")
        if flat is not None:
            self._free(flat)

    def _wait(self, unit: Unit, in_forward: bool) -> None:
        """Copy out what was gathered; unsharded parameters include the padding of all shards."""
        if not unit.pending:
            return
        unit.pending = False
        world = self._sharding.world_size
        name = "storage.resize_" if unit.was_gathered else "aten.empty.memory_format"
        unit.was_gathered = True
        cast = None
        for parameter in unit.parameters:
            numel = parameter.padded_numel(world) * world
            if world == 1 and self._is_cast(unit):
                before, cast = (
                    cast,
                    self._allocate("aten._to_copy.default", numel * parameter.nbytes_each, Category.COMMUNICATION),
                )
                if before is not None:
                    self._free(before)
            row = self._allocate(name, numel * parameter.nbytes_each, Category.PARAMETER)
            unit.unsharded.append(row)
            if world == 1:
                self._run("aten.copy_.default")
        if cast is not None:
            self._free(cast)
        if world == 1:
            return
        self._run("fsdp.split_with_sizes_copy.default")
        if in_forward:
            self._free_kept()
            self._kept_in_forward = unit.gathered
        else:
            self._free(unit.gathered)
        unit.gathered = None

    def _reshard(self, unit: Unit) -> None:
        for row in unit.unsharded:
            self._free(row)
        unit.unsharded.clear()

    def _free_kept(self) -> None:
        if self._kept_in_forward is not None:
            self._free(self._kept_in_forward)
            self._kept_in_forward = None

    def _free_reduced(self) -> None:
        if self._reduced is not None:
            self._free(self._reduced)
            self._reduced = None

    def _uniform(self, unit: Unit) -> int:
        sizes = {parameter.nbytes_each for parameter in unit.parameters}
        if len(sizes) > 1:
            raise InputError("A unit's parameters are of different dtypes: FSDP2 is not rewritten for that.")
        return sizes.pop()

    def _original(self, parameter: Parameter) -> int:
        name = self._sharding.orig_dtype
        return _ITEMSIZE[name] if name else parameter.nbytes_each

    def _is_cast(self, unit: Unit) -> bool:
        return any(self._original(parameter) != parameter.nbytes_each for parameter in unit.parameters)

    # -- rows --

    def _run(self, name: str) -> None:
        event = self._event
        phase = Phase.FORWARD if event.what.endswith("forward") else Phase.BACKWARD
        self._at.append(event.at)
        self._ops.append((name, event.unit.module, event.iteration, int(phase)))

    def _allocate(self, name: str, nbytes: int, category: Category) -> int:
        self._rows.append([self._now, None, nbytes, int(category), self._event.unit.module])
        self._run(name)
        return len(self._rows) - 1

    def _free(self, row: int) -> None:
        self._rows[row][1] = self._now

    # -- the result --

    def finish(self) -> Liveness:
        plain = self._plain
        at = np.asarray(self._at, dtype=np.int64)
        # What died at an insertion went before it; what was born there comes after it.
        birth = plain.birth + np.searchsorted(at, plain.birth, side="right")
        death = plain.death + np.searchsorted(at, plain.death, side="left")
        nbytes = plain.nbytes.copy()
        for row, size in self._resized_rows():
            nbytes[row] = size
        for new, gradients in self._ends:
            self._rows[new][1] = int(max(death[row] for row in gradients))
        for row, when in self._deaths.items():
            death[row] = when
        end = plain.num_ops + len(at) + 1
        rows = [[b, end if d is None else d, *rest] for b, d, *rest in self._rows]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 5)
        result = replace(
            self._with_operations(at), birth=birth.astype(np.int32), death=death.astype(np.int32), nbytes=nbytes
        )
        return _with_rows(result, columns)

    def _resized_rows(self):
        """(plain storage, its bytes on this rank) of parameters and of what the optimizer makes."""
        world, rank = self._sharding.world_size, self._sharding.rank
        for unit in self._plan.units:
            for parameter in unit.parameters:
                yield parameter.row, parameter.padded_numel(world) * self._original(parameter)
        for row, parameter in self._plan.optimizer_rows.items():
            yield row, parameter.local_numel(world, rank) * self._original(parameter)

    def _with_operations(self, at: np.ndarray) -> Liveness:
        plain = self._plain
        names = list(plain.op_names)
        index = {name: number for number, name in enumerate(names)}
        for name, *_ in self._ops:
            if name not in index:
                index[name] = len(names)
                names.append(name)
        added = np.array([(index[name], *rest) for name, *rest in self._ops], dtype=np.int64).reshape(-1, 4)

        def insert(column, values):
            return np.insert(column, at, values).astype(column.dtype)

        return replace(
            plain,
            op=insert(plain.op, added[:, 0]),
            op_module=insert(plain.op_module, added[:, 1]),
            op_iteration=insert(plain.op_iteration, added[:, 2]),
            op_phase=insert(plain.op_phase, added[:, 3]),
            op_recompute=insert(plain.op_recompute, False),
            op_node=insert(plain.op_node, -1),
            op_names=names,
        )


def _with_rows(liveness: Liveness, columns: np.ndarray) -> Liveness:
    """`columns`: birth, death, nbytes, category, module of each new storage."""
    count = len(columns)

    def extend(column, values):
        return np.concatenate([column, np.asarray(values, dtype=column.dtype)])

    names = list(liveness.dtype_names)
    if "uint8" not in names:
        names.append("uint8")
    return replace(
        liveness,
        birth=extend(liveness.birth, columns[:, 0]),
        death=extend(liveness.death, columns[:, 1]),
        nbytes=extend(liveness.nbytes, columns[:, 2]),
        category=extend(liveness.category, columns[:, 3]),
        module=extend(liveness.module, columns[:, 4]),
        source=extend(liveness.source, [-1] * count),
        dtype=extend(liveness.dtype, [names.index("uint8")] * count),
        shapes=[*liveness.shapes, *((int(nbytes),) for nbytes in columns[:, 2])],
        dtype_names=names,
    )
