"""StepGraph: one training step as it was executed.

The recorder appends one row per operation and one per storage; `StepGraph.fx_graph()` lays the rows out as a
`torch.fx.Graph` whose nodes are the aten calls in the order in which they ran, so that torch's own tools can print,
check and walk it. Everything that needs only sizes and times is in the Liveness, which needs no torch.

Arguments are kept in plain Python, with `Value` for a tensor: (index into the value columns). Values of operators that
write in place are new values on the same storage.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from metapeak.tracer.liveness import Liveness, Phase


class Value(int):
    """A reference to a row of the value columns, used inside recorded arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"%{int(self)}"


class Symbol(str):
    """A torch constant inside recorded arguments: `torch.float32`, `torch.strided`, `cpu`, ..."""

    __slots__ = ()


@dataclass(kw_only=True, eq=False)
class SavedTensors:
    """What autograd saved, apart from what Python held: the step as gradient checkpointing needs to know it.

    A step recorded with `decouple_saves` keeps no storage alive for backward's sake; instead a row here says when a
    tensor was saved, read and released. Every event has a tick, so that events between two operations have an order.

    Rows of saves: `value` (the tensor), `packed`, `unpacked`, `released` (operations recorded so far at each event)
    with the ticks of each; unpacked is -1 for a tensor that backward never read.
    Rows of module calls: `call_module`, `call_ops` (first operation, operation after the last), `call_saves` likewise,
    `call_ticks` (when it began and ended), `call_inputs` (the storages of all its arguments),
    `call_keywords` (of its keyword arguments). `losses`: the storage of each forward's loss,
    `graph_ends` (operations recorded, tick) when the autograd graph behind it went.
    `casts`: storages that autocast's cache held; `cast_reuses`: (storage, operations recorded, tick) of each time that
    one was found there.
    `backward_of` has a row an operation: the forward operation whose gradient it computes, -1 for none.
    `op_tick` has a row an operation. `eager_death`, `eager_death_tick` have a row a storage: when the last reference
    other than a save went. `ghosts` are the tensors that backward read in place of saved ones: (save, death, tick).
    """

    value: list[int] = field(default_factory=list)
    packed: list[int] = field(default_factory=list)
    packed_tick: list[int] = field(default_factory=list)
    unpacked: list[int] = field(default_factory=list)
    unpacked_tick: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    released_tick: list[int] = field(default_factory=list)
    call_module: list[int] = field(default_factory=list)
    call_ops: list[list[int]] = field(default_factory=list)
    call_saves: list[list[int]] = field(default_factory=list)
    call_ticks: list[list[int]] = field(default_factory=list)
    call_inputs: list[tuple[int, ...]] = field(default_factory=list)
    call_keywords: list[tuple[int, ...]] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)
    graph_ends: list[list[int]] = field(default_factory=list)
    casts: list[int] = field(default_factory=list)
    cast_reuses: list[list[int]] = field(default_factory=list)
    backward_of: list[int] = field(default_factory=list)
    op_tick: list[int] = field(default_factory=list)
    eager_death: list[int] = field(default_factory=list)
    eager_death_tick: list[int] = field(default_factory=list)
    ghosts: list[list[int]] = field(default_factory=list)

    @functools.cached_property
    def backward_of_sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """(forward operations, their backward operations), in order of the forward operations."""
        forward = np.asarray(self.backward_of)
        order = np.argsort(forward, kind="stable")
        return forward[order], order


# Names of operations that are not operators: how a tensor that exists before the step comes in.
LOAD = "load"
# The name of the operation by which a storage gets new memory (UntypedStorage.resize_, no operator).
RESIZE = "storage.resize_"
# How the names of operations begin that do nothing and say where something starts.
MARK = "mark."


@dataclass(kw_only=True, eq=False)
class StepGraph:
    """Rows of operations, of the values (tensors) they return, and of the storages under those.

    Operation rows: `op` (index into `op_names`: `aten.mm.default`, or LOAD for a tensor that was there before),
    `args`, `kwargs`, `phase`, `iteration`, `module` and `source` (indices; -1 is none), `recompute`.
    Value rows: `value_node`, `value_output` (which result of that operation), `value_storage`, `value_dtype` (index),
    `value_shape`, `value_stride`, `value_offset` (elements).
    Storage rows: `birth`, `death` (see liveness.py), `nbytes`, `category`, `owner` (module index: who made it, or whose
    parameter it serves), `storage_value` (the first value on it), `stream` (0: the default one).
    `whole`: storages of parameters that a sharded step keeps whole on every rank; `unsharded`: storages of gathered
    parameters and of gradients that are not reduced yet. `host_bytes`: the most that the program keeps on the host, of
    what it offloads or of arrays that an evaluation makes.
    `output_dtypes`: what the model returned, by name, and `head`: its logits as the head made them.
    `actions` of a pipeline's rank: [iteration, kind, stage, microbatch, first operation], see pipeline.py;
    `boundary_buffers`: [storage, microbatch] of what its neighbours send into.
    """

    op_names: list[str] = field(default_factory=list)
    module_names: list[str] = field(default_factory=list)
    module_classes: list[str] = field(default_factory=list)
    block_names: list[str] = field(default_factory=list)
    source_names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)

    op: list[int] = field(default_factory=list)
    args: list[tuple] = field(default_factory=list)
    kwargs: list[dict[str, Any]] = field(default_factory=list)
    phase: list[int] = field(default_factory=list)
    iteration: list[int] = field(default_factory=list)
    module: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    recompute: list[bool] = field(default_factory=list)

    value_node: list[int] = field(default_factory=list)
    value_output: list[int] = field(default_factory=list)
    value_storage: list[int] = field(default_factory=list)
    value_dtype: list[int] = field(default_factory=list)
    value_shape: list[tuple[int, ...]] = field(default_factory=list)
    value_stride: list[tuple[int, ...]] = field(default_factory=list)
    value_offset: list[int] = field(default_factory=list)

    birth: list[int] = field(default_factory=list)
    death: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    category: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    storage_value: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)

    load_names: dict[int, str] = field(default_factory=dict)
    output_dtypes: dict[str, str] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    unsharded: set[int] = field(default_factory=set)
    host_bytes: int = 0
    saved: SavedTensors | None = None
    actions: list[list] = field(default_factory=list)
    boundary_buffers: list[list[int]] = field(default_factory=list)

    @property
    def num_ops(self) -> int:
        return len(self.op)

    def liveness(self) -> Liveness:
        """The storages and operations as flat integer columns."""
        first = np.asarray(self.storage_value, dtype=np.int64)
        node = np.asarray(self.value_node, dtype=np.int64)[first] if len(first) else first
        liveness = Liveness(
            birth=np.asarray(self.birth, dtype=np.int32),
            death=np.asarray(self.death, dtype=np.int32),
            nbytes=np.asarray(self.nbytes, dtype=np.int64),
            category=np.asarray(self.category, dtype=np.int8),
            module=np.asarray(self.owner, dtype=np.int32),
            source=np.asarray(self.source, dtype=np.int32)[node],
            dtype=np.asarray(self.value_dtype, dtype=np.int16)[first],
            shapes=[self.value_shape[value] for value in self.storage_value],
            stream=np.asarray(self.stream, dtype=np.int8) if any(self.stream) else None,
            op=np.asarray(self.op, dtype=np.int32),
            op_phase=np.asarray(self.phase, dtype=np.int8),
            op_iteration=np.asarray(self.iteration, dtype=np.int16),
            op_module=np.asarray(self.module, dtype=np.int32),
            op_recompute=np.asarray(self.recompute, dtype=bool),
            op_node=np.arange(self.num_ops, dtype=np.int32),
            op_names=self.op_names,
            module_names=self.module_names,
            source_names=self.source_names,
            dtype_names=self.dtype_names,
        )
        liveness.lint()
        return liveness

    def lint(self) -> None:
        """Raise ValueError when rows contradict each other, or torch.fx's own lint fails.

        Checked: every value is read after it was made, while its storage lives; storages are born by the operation
        that made their first value; and torch.fx's rules for graphs.
        """
        for node, (args, kwargs) in enumerate(zip(self.args, self.kwargs)):
            for value in values_in((args, kwargs)):
                if self.value_node[value] >= node:
                    raise ValueError(f"operation {node} reads value {value!r} of operation {self.value_node[value]}")
                storage = self.value_storage[value]
                if not self.birth[storage] <= node < self.death[storage]:
                    raise ValueError(f"operation {node} reads {value!r} on storage {storage}, which is not alive then")
        for storage, value in enumerate(self.storage_value):
            if self.value_storage[value] != storage or self.value_node[value] != self.birth[storage]:
                raise ValueError(f"storage {storage} was not born by the operation of its first value")
        self.liveness()
        self.fx_graph().lint()

    def fx_graph(self):
        """The step as a `torch.fx.Graph`.

        Placeholders are the tensors that were there before (parameters, buffers, inputs), call_function nodes the
        operators; results of operators with several are `operator.getitem` nodes. `node.meta` holds `phase`,
        `iteration`, `module`, `source_line`, `recompute`, and `tensors`: (shape, dtype, storage) of each result.
        """
        from metapeak.tracer.fx_export import to_fx_graph

        return to_fx_graph(self)

    def to_networkx(self):
        """A `networkx.DiGraph` of the data flow: nodes are operation indices, with op, phase, module and bytes."""
        import networkx

        graph = networkx.DiGraph()
        born: dict[int, int] = {}
        for storage, birth in enumerate(self.birth):
            born[birth] = born.get(birth, 0) + self.nbytes[storage]
        for node in range(self.num_ops):
            graph.add_node(
                node,
                op=self.op_names[self.op[node]],
                phase=Phase(self.phase[node]).label,
                iteration=self.iteration[node],
                module=self.module_names[self.module[node]],
                allocated_bytes=born.get(node, 0),
            )
            for value in values_in((self.args[node], self.kwargs[node])):
                graph.add_edge(self.value_node[value], node)
        return graph

    def __str__(self) -> str:
        lines = []
        outputs: dict[int, list[int]] = {}
        for value, node in enumerate(self.value_node):
            outputs.setdefault(node, []).append(value)
        for node in range(self.num_ops):
            results = ", ".join(
                f"%{value}:{self.dtype_names[self.value_dtype[value]]}{list(self.value_shape[value])}"
                for value in outputs.get(node, [])
            )
            arguments = [repr(argument) for argument in self.args[node]]
            arguments += [f"{name}={argument!r}" for name, argument in self.kwargs[node].items()]
            phase = (
                f"{self.iteration[node]}.{Phase(self.phase[node]).label}{' recompute' if self.recompute[node] else ''}"
            )
            module = self.module_names[self.module[node]]
            lines.append(f"{results} = {self.op_names[self.op[node]]}({', '.join(arguments)})  # {phase} {module}")
        return "\n".join(lines)


def values_in(arguments):
    """The Values inside recorded arguments, in order."""
    if type(arguments) is Value:
        yield arguments
    elif type(arguments) in (tuple, list):
        for argument in arguments:
            yield from values_in(argument)
    elif type(arguments) is dict:
        for argument in arguments.values():
            yield from values_in(argument)
