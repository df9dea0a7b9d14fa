"""Floating point operations of recorded operators, by torch's own formulas.

Source: torch/utils/flop_counter.py, flop_registry: matrix products, convolutions and attention; a multiply-add counts
two. Other operators count nothing there, and nothing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from metapeak.tracer.graph import StepGraph, Value

if TYPE_CHECKING:
    import numpy as np


def operation_flops(graph: StepGraph) -> np.ndarray:
    """FLOPs of each operation, shape [number of operations], int64."""
    import numpy as np
    from torch.utils.flop_counter import flop_registry

    formulas = {str(packet): formula for packet, formula in flop_registry.items()}
    formulas["aten._flash_attention_forward"] = _dense_flash_attention
    by_op = [formulas.get(".".join(name.split(".")[:2])) for name in graph.op_names]
    flops = np.zeros(graph.num_ops, dtype=np.int64)
    outputs: dict[int, dict[int, tuple[int, ...]]] = {}
    for value, node in enumerate(graph.value_node):
        if by_op[graph.op[node]] is not None:
            outputs.setdefault(node, {})[graph.value_output[value]] = graph.value_shape[value]
    known: dict[tuple, int] = {}
    for node, results in outputs.items():
        shapes = [results.get(position) for position in range(max(results) + 1)]
        args = tuple(_shapes(graph, argument) for argument in graph.args[node])
        kwargs = {name: _shapes(graph, argument) for name, argument in graph.kwargs[node].items()}
        key = (graph.op[node], repr(args), repr(kwargs))
        if key not in known:
            result = shapes[0] if len(shapes) == 1 else tuple(shapes)
            known[key] = int(by_op[graph.op[node]](*args, **kwargs, out_val=result))
        flops[node] = known[key]
    return flops


def _dense_flash_attention(query, key, value, *_, out_val=None, **__) -> int:
    """The flash_attn package's entry: [batch, length, heads, size], or packed [length, heads, size] as one sequence.

    torch's own formula wants tensors, and heads before the length. Both products count, as in its sdpa_flop_count.
    """
    batch = query[0] if len(query) == 4 else 1
    *_, length, heads, size = query
    return 2 * batch * heads * length * key[-3] * (size + value[-1])


def _shapes(graph: StepGraph, argument):
    """The argument with shapes in place of tensors."""
    if type(argument) is Value:
        return graph.value_shape[argument]
    if type(argument) in (list, tuple):
        return type(argument)(_shapes(graph, item) for item in argument)
    return argument
