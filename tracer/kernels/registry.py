"""The registry of kernel workspaces: one rule an operator, from its tensors and the GPU to the bytes it takes inside.

A kernel that needs memory beside its results takes it from the caching allocator while it runs and gives it back before
it returns; no dispatcher sees that. A rule returns the sizes of the blocks that are alive together with the results
when most is. Every operator is in one of three states: it has a rule here, it is declared to take nothing (none.py,
with the reason), or it is unknown, which the report says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def itemsize(dtype: str) -> int:
    """Bytes an element of a dtype by its torch name. Raises ValueError for packed ones.

    >>> itemsize("bfloat16"), itemsize("float32"), itemsize("int64"), itemsize("float8_e4m3fn")
    (2, 4, 8, 1)
    """
    bits = 8 if dtype == "bool" else int(re.search(r"\d+", dtype)[0])
    if bits < 8:
        raise ValueError(f"{dtype} holds several elements a byte")
    return bits // 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What kernels ask of the GPU: compute capability, streaming multiprocessors, and resident threads of each."""

    compute_capability: tuple[int, int] = (8, 0)
    multiprocessors: int = 108
    threads_per_multiprocessor: int = 2048


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as a kernel sees it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def transposed(self, first: int, second: int) -> Tensor:
        """With two dimensions swapped: a view."""
        order = list(range(len(self.shape)))
        order[first], order[second] = order[second], order[first]
        return Tensor(tuple(self.shape[axis] for axis in order), tuple(self.stride[axis] for axis in order), self.dtype)

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.stride)):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True

    @property
    def contiguous_copy_bytes(self) -> int:
        """Bytes that `tensor.contiguous()` allocates: none for a tensor that is."""
        return 0 if self.is_contiguous or not self.numel else self.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One execution of an operator: tensors in `args` are Tensors, results in order (None for what is none)."""

    op: str
    args: tuple
    kwargs: Mapping[str, Any]
    outputs: Sequence[Tensor | None]
    device: Device

    @property
    def overload(self) -> str:
        return self.op.rpartition(".")[2]

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """The argument by position or name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


Rule = Callable[[Call], Sequence[int]]
RULES: dict[str, Rule] = {}


def workspace(*names: str) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of these operators (`sum`, every overload and `sum_`)."""

    def register(rule: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"operator {name} has two workspace rules")
            RULES[name] = rule
        return rule

    return register


def base_name(op: str) -> str:
    """The operator without namespace, overload and the mark of its in-place variant.

    >>> base_name("aten.sum.dim_IntList"), base_name("aten._foreach_add_.Scalar"), base_name("load")
    ('sum', '_foreach_add', 'load')
    """
    parts = op.split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name
