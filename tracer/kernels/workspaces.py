"""Workspaces of a recorded step: every operation's, looked up once, then put into any rewrite of its liveness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from metapeak.tracer.collection import uncollected
from metapeak.tracer.kernels.convolution import CONVOLUTIONS, convolution_bound
from metapeak.tracer.kernels.cublas import with_cublas_workspaces
from metapeak.tracer.kernels.none import DECLARED_NONE
from metapeak.tracer.kernels.registry import RULES, Call, Device, Tensor, base_name
from metapeak.tracer.liveness import Category, Liveness

if TYPE_CHECKING:
    from metapeak.tracer.graph import StepGraph

# Operators of ours stand for kernels of other libraries (Triton, bitsandbytes), whose allocations are their results.
_OURS = "metapeak."


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelWorkspaces:
    """Sizes of the blocks that each operation of a graph takes inside, by operation, and what is not modelled."""

    device: Device
    blocks: dict[int, tuple[int, ...]]
    unknown: tuple[str, ...]
    convolution_bound_bytes: int

    @classmethod
    @uncollected()
    def of(cls, graph: StepGraph, device: Device) -> KernelWorkspaces:
        """Ask the registry about every operation of `graph`."""
        reader = _Reader(graph, device)
        names = [base_name(name) for name in graph.op_names]
        rules = [RULES.get(name) for name in names]
        convolutions = [name in CONVOLUTIONS for name in names]
        blocks, bound = {}, 0
        for node, op in enumerate(graph.op):
            if rules[op] is None:
                continue
            sizes = reader.blocks(node, rules[op])
            if sizes:
                blocks[node] = sizes
            if convolutions[op]:
                bound = max(bound, convolution_bound(reader.call(node)))
        unknown = {
            ".".join(graph.op_names[op].split(".")[:2])
            for op in set(graph.op)
            if rules[op] is None and names[op] not in DECLARED_NONE and not graph.op_names[op].startswith(_OURS)
        }
        return cls(device=device, blocks=blocks, unknown=tuple(sorted(unknown)), convolution_bound_bytes=bound)

    def added_to(self, liveness: Liveness) -> Liveness:
        """The liveness with these workspaces and those of cuBLAS.

        A workspace is alive during its operation only: it is allocated after the results and freed when the operation
        returns. What is run again has it again.
        """
        return with_cublas_workspaces(self.inside_kernels(liveness), self.device.compute_capability)

    def inside_kernels(self, liveness: Liveness) -> Liveness:
        """The liveness with these workspaces only: where a handle of cuBLAS has its own already."""
        has_any = np.isin(liveness.op_node, np.fromiter(self.blocks, dtype=np.int64, count=len(self.blocks)))
        births, sizes = [], []
        for position in np.flatnonzero(has_any).tolist():
            for nbytes in self.blocks[int(liveness.op_node[position])]:
                births.append(position)
                sizes.append(nbytes)
        return liveness.with_storages(
            birth=births,
            death=[position + 1 for position in births],
            nbytes=sizes,
            category=Category.WORKSPACE,
            module=liveness.op_module[births] if births else [],
            shapes=[(nbytes,) for nbytes in sizes],
            dtype="uint8",
        )

    def not_modelled(self) -> tuple[str, ...]:
        """Sentences on what this step's kernels may take that is not counted."""
        sentences = []
        if self.unknown:
            sentences.append("workspaces that kernels of these operators may take: " + ", ".join(self.unknown))
        if self.convolution_bound_bytes:
            sentences.append(
                "workspaces of cuDNN's convolutions, taken as none; transposed copies of the largest one's tensors "
                f"would be {self.convolution_bound_bytes / (1 << 20):,.0f} MiB"
            )
        return tuple(sentences)


class _Reader:
    """Recorded operations as Calls. Layers repeat, so equal calls are answered from memory."""

    def __init__(self, graph: StepGraph, device: Device):
        self._graph, self._device = graph, device
        self._tensors: dict[tuple, Tensor] = {}
        self._outputs = _outputs(graph)
        self._known: dict[tuple, tuple[int, ...]] = {}

    def blocks(self, node: int, rule: Callable) -> tuple[int, ...]:
        call = self.call(node)
        key = (call.op, call.args, tuple(sorted(call.kwargs.items())), call.outputs)
        if key not in self._known:
            self._known[key] = tuple(int(nbytes) for nbytes in rule(call) if nbytes)
        return self._known[key]

    def call(self, node: int) -> Call:
        graph = self._graph
        return Call(
            op=graph.op_names[graph.op[node]],
            args=self._plain(graph.args[node]),
            kwargs={name: self._plain(value) for name, value in graph.kwargs[node].items()},
            outputs=tuple(self._tensor(value) for value in self._outputs.get(node, ())),
            device=self._device,
        )

    def _plain(self, argument):
        from metapeak.tracer.graph import Value

        if type(argument) is Value:
            return self._tensor(int(argument))
        if type(argument) in (list, tuple):
            return tuple(self._plain(item) for item in argument)
        return argument

    def _tensor(self, value: int | None) -> Tensor | None:
        if value is None:
            return None
        graph = self._graph
        key = (graph.value_shape[value], graph.value_stride[value], graph.value_dtype[value])
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = Tensor(key[0], key[1], graph.dtype_names[key[2]])
        return tensor


def _outputs(graph: StepGraph) -> dict[int, list[int | None]]:
    """Values of every operation by position; None for results that are no tensors."""
    outputs: dict[int, list[int | None]] = {}
    for value, (node, position) in enumerate(_positions(graph)):
        row = outputs.setdefault(node, [])
        row.extend([None] * (position + 1 - len(row)))
        row[position] = value
    return outputs


def _positions(graph: StepGraph) -> Iterator[tuple[int, int]]:
    return zip(graph.value_node, graph.value_output)
