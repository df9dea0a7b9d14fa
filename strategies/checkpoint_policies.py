"""Policies of gradient checkpointing: which modules run again, which operators' results are kept; and their names.

What a policy does to a recorded step is recompute.py's and offload.py's work; how it is applied to a real model,
gradient_checkpointing.py's.
Sources: torch/utils/checkpoint.py (create_selective_checkpoint_contexts); torchtitan's option `selective` with a number
(every N-th layer, counted from one) and with `op` (distributed/activation_checkpoint.py, _apply_op_sac; models/llama3,
_op_sac_save_list).
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from metapeak.tracer.errors import InputError
from metapeak.tracer.gpus import gpu_of_memory

if TYPE_CHECKING:
    from metapeak.strategies.regions import Region
    from metapeak.tracer.graph import StepGraph
    from metapeak.tracer.liveness import Liveness

# Matrix products, the operators that "every second matmul" counts.
MATMULS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")
# torchtitan's _op_sac_save_list for Llama 3, without its higher-order operators (flex attention, compiled code).
TORCHTITAN_SAVES = (
    "aten.mm.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_attention_math.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "aten.max.default",
)


class Policy(Protocol):
    """Which modules of a traced model are checkpointed. `name` is its spelling as an option.

    A policy that keeps operations inside its regions also has `regions(graph) -> list[Region]`: see `policy_regions`.
    """

    @property
    def name(self) -> str: ...

    def modules(self, graph: StepGraph) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Nothing:
    """No module."""

    name: str = "none"

    def modules(self, graph: StepGraph) -> list[str]:
        return []


@dataclass(frozen=True, slots=True)
class EveryBlock:
    """All blocks."""

    name: str = "full"

    def modules(self, graph: StepGraph) -> list[str]:
        return _blocks(graph)


@dataclass(frozen=True, slots=True)
class EveryNth:
    """Every N-th block, counted from one: of eight blocks, every:4 takes the fourth and the eighth."""

    every: int

    @property
    def name(self) -> str:
        return f"every:{self.every}"

    def modules(self, graph: StepGraph) -> list[str]:
        return [block for position, block in enumerate(_blocks(graph), 1) if position % self.every == 0]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks by their numbers, counted from zero."""

    numbers: tuple[int, ...]

    @property
    def name(self) -> str:
        return "layers:" + _ranges(self.numbers)

    def modules(self, graph: StepGraph) -> list[str]:
        blocks = _blocks(graph)
        beyond = [number for number in self.numbers if number >= len(blocks)]
        if beyond:
            raise InputError(
                f"checkpointing layers: {beyond[0]} is out of range: the model has {len(blocks)} blocks, "
                f"0 to {len(blocks) - 1}."
            )
        return [blocks[number] for number in self.numbers]


@dataclass(frozen=True, slots=True)
class Modules:
    """Modules whose path matches one of the patterns (`*` matches any text, dots too)."""

    patterns: tuple[str, ...]

    @property
    def name(self) -> str:
        return "modules:" + ",".join(self.patterns)

    def modules(self, graph: StepGraph) -> list[str]:
        called = _called(graph)
        matched = [name for name in called if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)]
        if not matched:
            raise InputError(
                f"checkpointing {self.name} matches no module. Some that there are: {', '.join(called[:8])}."
            )
        return [name for name in matched if not any(name.startswith(other + ".") for other in matched)]


@dataclass(frozen=True, slots=True)
class SelectiveOps:
    """All blocks, with the outputs of these operators saved: `mm` (all overloads) or `aten.mm.default`."""

    save_ops: tuple[str, ...]

    @property
    def name(self) -> str:
        return "selective:ops=" + ",".join(self.save_ops)

    def modules(self, graph: StepGraph) -> list[str]:
        return _blocks(graph)

    def regions(self, graph: StepGraph) -> list[Region]:
        regions = selective_regions(graph, self.modules(graph), self.save_ops)
        run = {graph.op_names[graph.op[at]] for region in regions for at in range(region.begin, region.end)}
        for op in self.save_ops:
            if not any(_names_op(op, name) for name in run):
                raise InputError(
                    f"checkpointing {self.name}: no block runs '{op}'. Operators that run: {', '.join(sorted(run))}."
                )
        return regions


@dataclass(frozen=True, slots=True)
class SelectiveTorchtitan:
    """All blocks, with torchtitan's operator list saved, less every second mm: the first is saved, the second is not.

    The count starts anew in every call of a block. Linear layers with a bias are addmm, which the list does not have:
    they run again. Not modelled: its option that never saves the mm of some shapes (those of a router's gate).
    """

    name: str = "selective:torchtitan"
    save_ops: tuple[str, ...] = TORCHTITAN_SAVES
    every_second_matmul: bool = True

    def modules(self, graph: StepGraph) -> list[str]:
        return _blocks(graph)

    def regions(self, graph: StepGraph) -> list[Region]:
        return selective_regions(graph, self.modules(graph), self.save_ops, self.every_second_matmul)


@dataclass(frozen=True, slots=True)
class SelectiveMatmuls:
    """All blocks, with every second matrix product saved (`MATMULS`, counted together): the first, the third, ...

    Products of attention scores count too; linear layers with a bias are addmm.
    """

    name: str = "selective:matmul-every-2"
    save_ops: tuple[str, ...] = MATMULS
    every_second_matmul: bool = True

    def modules(self, graph: StepGraph) -> list[str]:
        return _blocks(graph)

    def regions(self, graph: StepGraph) -> list[Region]:
        return selective_regions(graph, self.modules(graph), self.save_ops, self.every_second_matmul)


class SaveRule:
    """Which operators of one call of a region are saved; asked once for each, in the order in which they run."""

    def __init__(self, save_ops: Iterable[str], every_second_matmul: bool = False):
        self._save_ops, self._every_second = tuple(save_ops), every_second_matmul
        self._matmuls = 0

    def saves(self, op: str) -> bool:
        if not any(_names_op(name, op) for name in self._save_ops):
            return False
        if self._every_second and op in MATMULS:
            self._matmuls += 1
            return self._matmuls % 2 == 1
        return True


@functools.cache
def _names_op(text: str, op: str) -> bool:
    """Whether `mm`, `aten.mm` or `aten.mm.default` means the operator `aten.mm.default`."""
    packet = op.rpartition(".")[0]
    return text in (op, packet) or f"aten.{text}" in (op, packet)


def selective_regions(
    graph: StepGraph, modules: Iterable[str], save_ops: Iterable[str], every_second_matmul: bool = False
) -> list[Region]:
    """The calls of these modules, with the operations kept that `apply_checkpoint_plan` would save.

    Raises InputError for operators whose outputs cannot be saved (views, outputs that are written in place).
    """
    from metapeak.strategies.regions import keeping, regions_of

    regions, kept, save_ops = regions_of(graph, modules), [], tuple(save_ops)
    for region in regions:
        rule = SaveRule(save_ops, every_second_matmul)
        operations = range(region.begin, region.end)
        kept += [operation for operation in operations if rule.saves(graph.op_names[graph.op[operation]])]
    return keeping(graph, regions, kept)


def policy_regions(policy: Policy, graph: StepGraph) -> list[Region]:
    """The regions of a policy: its own, or the calls of its modules."""
    from metapeak.strategies.regions import regions_of

    if hasattr(policy, "regions"):
        return policy.regions(graph)
    return regions_of(graph, policy.modules(graph))


def policy_liveness(policy: Policy, graph: StepGraph) -> tuple[Liveness, int]:
    """(the liveness of the step under a policy, the most bytes that it puts on the host)."""
    from metapeak.strategies.offload import offloaded
    from metapeak.strategies.recompute import checkpointed

    regions = policy_regions(policy, graph)
    return offloaded(graph, regions) if isinstance(policy, Offload) else (checkpointed(graph, regions), 0)


def policy_plan(policy: Policy, graph: StepGraph) -> dict:
    """What `apply_checkpoint_plan` does to a model for this policy."""
    if isinstance(policy, Offload):
        return {"checkpointed": [], "offloaded": policy.modules(graph)}
    plan: dict = {"checkpointed": policy.modules(graph)}
    if isinstance(policy, Reentrant):
        plan["use_reentrant"] = True
    if hasattr(policy, "save_ops"):
        plan |= {
            "save_ops": list(policy.save_ops),
            "every_second_matmul": getattr(policy, "every_second_matmul", False),
        }
    return plan


@dataclass(frozen=True, slots=True)
class Nested:
    """All blocks, and inside them the modules whose path matches one of the patterns."""

    patterns: tuple[str, ...]

    @property
    def name(self) -> str:
        return "nested:" + ",".join(self.patterns)

    def modules(self, graph: StepGraph) -> list[str]:
        blocks = set(_blocks(graph))
        inside = {
            name
            for name in _called(graph)
            if name.startswith(tuple(block + "." for block in blocks))
            and any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)
        }
        if not inside:
            raise InputError(f"checkpointing {self.name} matches no module inside the blocks.")
        return [name for name in _called(graph) if name in blocks | inside]


@dataclass(frozen=True, slots=True)
class SelectiveAttention:
    """The core of every attention, as Megatron's selective recompute: what is saved for scores and softmax goes."""

    name: str = "selective:attention"

    def modules(self, graph: StepGraph) -> list[str]:
        from metapeak.tracer.core_attention import SUFFIX

        found = [name for name in _called(graph) if name.endswith(SUFFIX)]
        if not found:
            raise InputError(
                "checkpointing selective:attention: no attention of this model goes through transformers' "
                "AttentionInterface, so its core is no region. Name modules: checkpointing modules:PATTERN."
            )
        return found


@dataclass(frozen=True, slots=True)
class Budget:
    """The blocks whose recompute costs least among those that keep the peak under this many bytes.

    As `metapeak checkpointing --budget`; workspaces are counted as on a GPU of compute capability 8.0.
    """

    nbytes: int

    @property
    def name(self) -> str:
        return f"budget:{self.nbytes / 2**30:g}GiB"

    def modules(self, graph: StepGraph) -> list[str]:
        from metapeak.strategies.checkpoint_study import plan_under

        return list(plan_under(graph, self.nbytes).result.modules)


@dataclass(frozen=True, slots=True)
class Offload:
    """All blocks, with everything that they save copied to the host until backward reads it; nothing runs again."""

    name: str = "offload"

    def modules(self, graph: StepGraph) -> list[str]:
        return _blocks(graph)


@dataclass(frozen=True, slots=True)
class Reentrant:
    """Another policy's modules, each under a reentrant checkpoint (`use_reentrant=True`)."""

    policy: Policy

    @property
    def name(self) -> str:
        return f"reentrant:{self.policy.name}"

    def modules(self, graph: StepGraph) -> list[str]:
        return self.policy.modules(graph)

    def regions(self, graph: StepGraph) -> list[Region]:
        from metapeak.strategies.regions import regions_of

        return regions_of(graph, self.modules(graph), reentrant=True)


def parse_policy(text: str) -> Policy:
    """The policy of an option's value: none, full, every:N, layers:0-15,20, modules:PATTERN[,PATTERN],
    nested:PATTERN[,PATTERN], offload, budget:GIB, selective:attention, selective:torchtitan, selective:matmul-every-2,
    selective:ops=NAME[,NAME], reentrant:POLICY.

    Raises InputError for anything else.

    >>> parse_policy("layers:0-2,5").numbers, parse_policy("every:2").every
    ((0, 1, 2, 5), 2)
    >>> parse_policy("selective:ops=mm,aten._softmax.default").save_ops
    ('mm', 'aten._softmax.default')
    """
    kind, _, rest = text.partition(":")
    if text == "none":
        return Nothing()
    if text == "full":
        return EveryBlock()
    if text == "offload":
        return Offload()
    if kind == "budget" and rest:
        return Budget(gpu_of_memory(f"{rest}GiB" if rest.replace(".", "", 1).isdigit() else rest).usable_bytes)
    if kind == "every" and re.fullmatch(r"[1-9]\d*", rest):
        return EveryNth(int(rest))
    if kind == "layers" and re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", rest):
        numbers: set[int] = set()
        for part in rest.split(","):
            first, _, last = part.partition("-")
            if last and int(last) < int(first):
                raise InputError(f"checkpointing {text}: the range {part} runs backwards.")
            numbers.update(range(int(first), int(last or first) + 1))
        return Blocks(tuple(sorted(numbers)))
    if kind == "reentrant":
        inner = parse_policy(rest)
        if hasattr(inner, "regions") or isinstance(inner, (Nothing, Nested, Offload, Budget)):
            raise InputError(f"checkpointing {text}: a reentrant checkpoint takes full, every:, layers: or modules:.")
        return Reentrant(inner)
    if kind in ("modules", "nested") and rest:
        return (Modules if kind == "modules" else Nested)(tuple(rest.split(",")))
    if kind == "selective":
        if rest == "attention":
            return SelectiveAttention()
        if rest == "torchtitan":
            return SelectiveTorchtitan()
        if rest == "matmul-every-2":
            return SelectiveMatmuls()
        if re.fullmatch(r"ops=[\w.]+(,[\w.]+)*", rest):
            return SelectiveOps(tuple(rest.removeprefix("ops=").split(",")))
    raise InputError(
        f"Unknown checkpointing policy '{text}'. Known: none, full, every:N, layers:0-15,20, "
        "modules:PATTERN[,PATTERN], nested:PATTERN[,PATTERN], offload, budget:GIB, selective:attention, "
        "selective:torchtitan, selective:matmul-every-2, selective:ops=NAME[,NAME], reentrant:POLICY."
    )


def _called(graph: StepGraph) -> list[str]:
    names = [graph.module_names[index] for index in dict.fromkeys(graph.saved.call_module) if index >= 0]
    return [name for name in names if name]


def _blocks(graph: StepGraph) -> list[str]:
    called = set(_called(graph))
    blocks = [name for name in graph.block_names if name in called]
    if not blocks:
        from metapeak.strategies.cuts import single_tensor_modules

        blocks = single_tensor_modules(graph)
    if not blocks:
        raise InputError("The model has no list of blocks. Name modules: checkpointing modules:PATTERN.")
    return blocks


def _ranges(numbers: tuple[int, ...]) -> str:
    """Numbers as ranges: 0-2,5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
