"""The recorded step of one rank as another rank of FSDP2 would have run it: the last ranks' shards are smaller.

What it changes: the sizes of what the optimizer makes in the shape of a shard. Everything else of a rank is padded to
the same size on all of them: shards of parameters, buffers of collectives, reduced gradients.
Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (_init_sharded_param: padded_sharded_param, and the DTensor
on a narrowed view of it).
Where it cannot be told what a storage is like (factored or quantised states, an optimizer in backward, masters made
before the first step) there is no answer, and the rank is traced.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

from metapeak.strategies.base import Strategy
from metapeak.strategies.parallel.fsdp2 import FSDP2
from metapeak.strategies.parallel.layout import Layout
from metapeak.tracer.graph import StepGraph, Value
from metapeak.tracer.liveness import Category, Phase


def can_differ_in_shards_alone(strategies: Sequence[Strategy], layout: Layout | None) -> bool:
    """Whether ranks of this job run the same operations on shards of different sizes, and nothing else differs."""
    if layout is None or layout.world_size != layout.dp_replicate * layout.dp_shard:
        return False
    return all(strategy.layout is None or isinstance(strategy, FSDP2) for strategy in strategies)


def graph_of_rank(graph: StepGraph, rows: Mapping[str, int], layout: Layout, rank: int) -> StepGraph | None:
    """`graph`, recorded as rank 0, as `rank`; None where that cannot be told.

    `rows`: the first dimension of every whole parameter, by name.
    """
    made_early = any(
        category in (Category.OPTIMIZER_STATE, Category.GRADIENT) and graph.phase[birth] in _NOT_BY_SHARDS[category]
        for category, birth in zip(graph.category, graph.birth)
    )
    # What reads gradients as they are (norms, for clipping) may take a workspace of their size.
    normed = any("norm" in name for name in graph.op_names if name.startswith("aten._foreach"))
    labels = None if made_early or normed else _parameters_of_storages(graph)
    if labels is None:
        return None
    place = layout.coordinates(rank)["dp_shard"]
    found = copy.copy(graph)
    found.nbytes, found.value_shape = list(graph.nbytes), list(graph.value_shape)
    resized = {}
    for storage, name in labels.items():
        shape = graph.value_shape[graph.storage_value[storage]]
        chunk = -(-rows[name] // layout.dp_shard)
        if not shape or shape[0] != min(chunk, rows[name]):
            return None
        mine = max(0, min(chunk, rows[name] - place * chunk))
        found.nbytes[storage] = graph.nbytes[storage] // shape[0] * mine if shape[0] else 0
        resized[storage] = (shape, (mine, *shape[1:]))
    for value, storage in enumerate(graph.value_storage):
        if storage in resized and graph.value_shape[value] == resized[storage][0]:
            found.value_shape[value] = resized[storage][1]
    return found


# Phases of a birth that say that a shard's size is in a storage that is not looked at here.
_NOT_BY_SHARDS = {
    Category.OPTIMIZER_STATE: (Phase.LOAD, Phase.FORWARD, Phase.BACKWARD),
    Category.GRADIENT: (Phase.LOAD, Phase.FORWARD),
}


def _parameters_of_storages(graph: StepGraph) -> dict[int, str] | None:
    """For every storage with dimensions that the optimizer makes, the parameter that it goes with; None if unknown."""
    labels = {
        graph.value_storage[value]: graph.load_names[node]
        for value, node in enumerate(graph.value_node)
        if node in graph.load_names and graph.category[graph.value_storage[value]] == Category.PARAMETER
    }
    made: dict[int, str] = {}
    outputs: dict[int, list[int]] = {}
    for value, node in enumerate(graph.value_node):
        if graph.phase[node] == Phase.OPTIMIZER:
            outputs.setdefault(node, []).append(value)
    for node, values in outputs.items():
        positions = list(_labels_by_position(graph, labels, graph.args[node]))
        for value in values:
            storage = graph.value_storage[value]
            if graph.birth[storage] != node or not graph.value_shape[value]:
                continue
            position = graph.value_output[value]
            name = positions[position] if position < len(positions) else None
            if name is None:
                return None
            labels[storage] = made[storage] = name
    return made


def _labels_by_position(graph: StepGraph, labels: Mapping[int, str], arguments: tuple) -> Iterator[str | None]:
    """The parameter of each element of the lists that a foreach operator takes, or of the tensor that another takes."""
    lists = [argument for argument in arguments if isinstance(argument, (list, tuple))]
    for elements in zip(*lists) if lists else [arguments]:
        known = (labels.get(graph.value_storage[element]) for element in elements if type(element) is Value)
        yield next((name for name in known if name is not None), None)
