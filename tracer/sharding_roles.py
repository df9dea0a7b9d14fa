"""What the storages of sharded training are for, told by the collectives that they pass through.

An all-gather's flat output is communication and what is copied out of it unsharded parameters; what a reduce-scatter is
packed from are unsharded gradients, and its packed input and output communication. What a reducer all-reduces are its
buckets. Sources: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (foreach_all_gather, foreach_reduce);
torch/distributed/fsdp/_runtime_utils.py (_reduce_grad); torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from metapeak.tracer.graph import StepGraph, values_in
from metapeak.tracer.liveness import Category, Phase

if TYPE_CHECKING:
    import torch

# Operations that lie between the gradients of FSDP1's views and the reduce-scatter of its flat gradient.
_PACKING = ("aten.cat", "aten.constant_pad_nd", "aten._to_copy")


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether a rank holds only a part of a parameter: a DTensor that is cut, or part of a flat parameter of FSDP1."""
    placements = getattr(parameter, "placements", ())
    return any(not placement.is_replicate() for placement in placements) or _is_flat(parameter)


def _is_flat(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "_fsdp_flattened", False) or hasattr(parameter, "_unpadded_unsharded_size")


def roles_of_collectives(graph: StepGraph) -> dict[int, Category]:
    """Category by storage for what the collectives of the recorded step touch; the first role of a storage counts.

    Gathered parameters and gradients before their reduction are noted as the graph's `unsharded`.
    """
    roles: dict[int, Category] = {}
    shared = [name.startswith(("fsdp.", "c10d.")) for name in graph.op_names]
    if not any(shared):
        return roles
    made_by = _results(graph)
    for node, op in enumerate(graph.op):
        if not shared[op]:
            continue
        name = graph.op_names[op]
        for row, category in _roles(graph, node, name, made_by):
            roles.setdefault(row, category)
            if category in (Category.PARAMETER, Category.GRADIENT):
                graph.unsharded.add(row)
        if name.startswith("c10d._allgather_base_"):  # FSDP1 gathers into the parameter itself
            graph.unsharded.update(_rows(graph, graph.args[node][0]))
    return roles


def _results(graph: StepGraph) -> dict[int, list[int]]:
    """Storages of the results of each operation that packs what is gathered."""
    packs = [name.startswith("fsdp.all_gather_copy_in") for name in graph.op_names]
    made: dict[int, list[int]] = {}
    if any(packs):
        for value, node in enumerate(graph.value_node):
            if packs[graph.op[node]]:
                made.setdefault(node, []).append(graph.value_storage[value])
    return made


def _roles(graph: StepGraph, node: int, name: str, made_by) -> Iterator[tuple[int, Category]]:
    if name.startswith("fsdp.all_gather_copy_in"):
        for row in made_by.get(node, ()):
            yield row, Category.COMMUNICATION
    elif name.startswith("fsdp.split_with_sizes_copy"):
        for row in _rows(graph, graph.kwargs[node].get("out", ())):
            yield row, Category.PARAMETER
    elif name.startswith("fsdp.chunk_cat"):
        for row in _rows(graph, graph.args[node][0]):
            yield row, Category.GRADIENT
        for row in _rows(graph, graph.kwargs[node].get("out", ())):
            yield row, Category.COMMUNICATION
    elif name.startswith("c10d._reduce_scatter_base_"):
        yield from _flat_gradient(graph, graph.args[node][1])
        for row in _rows(graph, graph.args[node][:2]):
            yield row, Category.COMMUNICATION
    elif name.startswith(("c10d.allreduce_", "c10d._allgather_base_")):
        for row in _rows(graph, graph.args[node][0]):
            yield row, Category.COMMUNICATION


def _rows(graph: StepGraph, arguments) -> Iterator[int]:
    for value in values_in(arguments):
        yield graph.value_storage[value]


def _flat_gradient(graph: StepGraph, flat) -> Iterator[tuple[int, Category]]:
    """What FSDP1 packs into the input of a reduce-scatter: gradients of the views, put together in one `cat`.

    The packed one is a gradient, too: the flat parameter's own, unsharded.
    """
    waiting, seen = list(_rows(graph, flat)), set()
    while waiting:
        row = waiting.pop()
        birth = graph.birth[row]
        if row in seen or graph.phase[birth] != Phase.BACKWARD:
            continue
        seen.add(row)
        name = graph.op_names[graph.op[birth]]
        if name.startswith(_PACKING):
            yield row, Category.GRADIENT
            parts = list(_rows(graph, graph.args[birth]))
            if name.startswith("aten.cat"):
                for part in parts:
                    if graph.phase[graph.birth[part]] == Phase.BACKWARD:
                        yield part, Category.GRADIENT
            else:
                waiting += parts
