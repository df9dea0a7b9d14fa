"""Modules that a single tensor enters and a single tensor leaves: regions to checkpoint in a model without blocks."""

from __future__ import annotations

import networkx

from metapeak.tracer.graph import LOAD, StepGraph
from metapeak.tracer.liveness import Category, Phase


def single_tensor_modules(graph: StepGraph) -> list[str]:
    """Paths of the outermost modules between single-tensor cuts of the forward's data flow, in order of their calls.

    A cut counts activations, not parameters, buffers and inputs of the step, which are there anyway. Modules that save
    nothing for backward and the model itself are left out.
    """
    flow, saved = graph.to_networkx(), graph.saved
    forward = [
        node for node in range(graph.num_ops) if graph.phase[node] == Phase.FORWARD and graph.iteration[node] == 1
    ]
    flow = flow.subgraph([*forward, *(node for node in range(graph.num_ops) if graph.op_names[graph.op[node]] == LOAD)])
    found: list[str] = []
    for call, module in enumerate(saved.call_module):
        begin, end = saved.call_ops[call]
        name = graph.module_names[module] if module >= 0 else ""
        if not name or not forward or not forward[0] <= begin < end <= forward[-1] + 1:
            continue
        if saved.call_saves[call][0] == saved.call_saves[call][1] or any(
            name.startswith(other + ".") for other in found
        ):
            continue
        inside = [node for node in range(begin, end) if node in flow]
        outside = flow.nodes - set(inside)
        entering = {_storage(graph, node) for node, _ in networkx.edge_boundary(flow, outside, inside)} - {None}
        leaving = {_storage(graph, node) for node, _ in networkx.edge_boundary(flow, inside, outside)} - {None}
        if len(entering) <= 1 and len(leaving) <= 1 and name not in found:
            found.append(name)
    return found


def _storage(graph: StepGraph, node: int) -> int | None:
    """The activation that an operation gives; None for what is there before the step."""
    value = graph.value_node.index(node)
    row = graph.value_storage[value]
    here_anyway = (Category.PARAMETER, Category.BUFFER, Category.INPUT)
    return None if graph.category[row] in here_anyway else row
