"""A StepGraph as a `torch.fx.Graph`."""

from __future__ import annotations

import operator

import torch

from metapeak.tracer.graph import LOAD, MARK, StepGraph, Symbol, Value
from metapeak.tracer.liveness import Phase


def to_fx_graph(step: StepGraph) -> torch.fx.Graph:
    """See `StepGraph.fx_graph`. Raises AttributeError for an operator that this process has not registered."""
    graph = torch.fx.Graph()
    outputs: list[list[int]] = [[] for _ in range(step.num_ops)]
    for value, node in enumerate(step.value_node):
        outputs[node].append(value)
    of_value: dict[int, torch.fx.Node] = {}
    pending: dict[int, tuple[torch.fx.Node, int]] = {}  # results that get their getitem node when somebody reads them

    def node_of(value: int) -> torch.fx.Node:
        if value not in of_value:
            producer, output = pending[value]
            with graph.inserting_after(producer):
                item = graph.call_function(operator.getitem, (producer, output))
            item.meta = {**producer.meta, "tensors": [_tensor(step, value)]}
            of_value[value] = item
        return of_value[value]

    def argument(recorded):
        kind = type(recorded)
        if kind is Value:
            return node_of(int(recorded))
        if kind is tuple or kind is list:
            return kind([argument(item) for item in recorded])
        if kind is dict:
            return {name: argument(item) for name, item in recorded.items()}
        return _constant(recorded) if kind is Symbol else recorded

    # torch.fx wants every placeholder before the first operator, also those first seen late.
    order = [index for index in range(step.num_ops) if step.op_names[step.op[index]] == LOAD]
    loads = set(order)
    marks = {number for number, name in enumerate(step.op_names) if name.startswith(MARK)}
    order += [index for index in range(step.num_ops) if index not in loads and step.op[index] not in marks]
    for index in order:
        name = step.op_names[step.op[index]]
        if index in loads:
            node = graph.placeholder(_identifier(step.load_names.get(index, f"loaded_{index}")))
        else:
            arguments, keywords = argument(step.args[index]), argument(step.kwargs[index])
            node = graph.call_function(_resolve(name), arguments, keywords)
        node.meta = {
            "index": index,
            "phase": Phase(step.phase[index]).label,
            "iteration": step.iteration[index],
            "module": step.module_names[step.module[index]],
            "source_line": step.source_names[step.source[index]] if step.source[index] >= 0 else None,
            "recompute": step.recompute[index],
            "tensors": [_tensor(step, value) for value in outputs[index]],
        }
        if len(outputs[index]) == 1 and not _returns_many(node):
            of_value[outputs[index][0]] = node
        else:
            for value in outputs[index]:
                pending[value] = (node, step.value_output[value])
    graph.output(None)
    return graph


def _returns_many(node: torch.fx.Node) -> bool:
    if node.op != "call_function":
        return False
    returns = node.target._schema.returns
    return len(returns) > 1 or any(str(item.type).startswith("List") for item in returns)


def _tensor(step: StepGraph, value: int) -> tuple[tuple[int, ...], str, int]:
    return step.value_shape[value], step.dtype_names[step.value_dtype[value]], step.value_storage[value]


def _resolve(name: str):
    """`aten.mm.default` -> torch.ops.aten.mm.default."""
    target = torch.ops
    for part in name.split("."):
        target = getattr(target, part)
    return target


def _constant(symbol: str):
    prefix, _, name = symbol.partition(".")
    if prefix == "torch":
        return getattr(torch, name)
    if symbol == "...":
        return Ellipsis
    return torch.device(symbol)


def _identifier(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)
