"""Gradient checkpointing: regions keep their input and run again in backward.

What it changes: `torch.utils.checkpoint` (non-reentrant, early stop) around blocks or other modules.
Where each byte comes from: `CheckpointEveryBlock` runs the real checkpoint code, switched on the way transformers does;
`GradientCheckpointing` rewrites the recorded step (recompute.py), which equals the re-trace operation by operation.
Offload to the host: offload.py. Not modelled: saving operators of which CUDA runs a composite's parts (those of
_safe_softmax, see COMPOSITE_ON_CUDA): selective checkpointing sees the composite as one.
Sources: transformers PreTrainedModel.gradient_checkpointing_enable; torch/utils/checkpoint.py
(create_selective_checkpoint_contexts); torchtitan's option `selective` with a number (every N-th layer, counted from
one) and with `op` (distributed/activation_checkpoint.py, _apply_op_sac; models/llama3, _op_sac_save_list).
"""

from __future__ import annotations

import fnmatch
import functools
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from metapeak.strategies.base import NoOpStrategy
from metapeak.tracer.errors import InputError
from metapeak.tracer.gpus import gpu_of_memory

if TYPE_CHECKING:
    import torch

    from metapeak.strategies.recompute import Region
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
    from metapeak.strategies.recompute import keeping, regions_of

    regions, kept, save_ops = regions_of(graph, modules), [], tuple(save_ops)
    for region in regions:
        rule = SaveRule(save_ops, every_second_matmul)
        operations = range(region.begin, region.end)
        kept += [operation for operation in operations if rule.saves(graph.op_names[graph.op[operation]])]
    return keeping(graph, regions, kept)


def policy_regions(policy: Policy, graph: StepGraph) -> list[Region]:
    """The regions of a policy: its own, or the calls of its modules."""
    from metapeak.strategies.recompute import regions_of

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
        from metapeak.strategies.recompute import regions_of

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


@dataclass(frozen=True, kw_only=True)
class GradientCheckpointing(NoOpStrategy):
    """A policy as a rewrite of the recorded step: one trace answers for every policy."""

    name = "checkpointing"
    needs_saves = True
    policy: Policy = field(default_factory=EveryBlock)

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        let_gradients_reach_the_blocks(module)
        return module

    def notes(self, module: torch.nn.Module) -> tuple[str, ...]:
        return (INPUT_GRADIENTS,) if _is_partly_frozen(module) else ()

    def rewrite(self, liveness: Liveness, graph: StepGraph) -> Liveness:
        return policy_liveness(self.policy, graph)[0]

    def remarks(self, graph: StepGraph) -> tuple[str, ...]:
        return ignored_blocks(graph)


@dataclass(frozen=True, kw_only=True)
class CheckpointModules(NoOpStrategy):
    """The oracle: a plan (see `apply_checkpoint_plan`) with the real `torch.utils.checkpoint`, before the trace."""

    name = "checkpointing"
    plan: Mapping[str, Any]

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        let_gradients_reach_the_blocks(module)
        apply_checkpoint_plan(module, self.plan)
        return module


@dataclass(frozen=True, kw_only=True)
class CheckpointEveryBlock(NoOpStrategy):
    """Every block that the model's own `gradient_checkpointing_enable` covers."""

    name = "checkpointing"
    use_reentrant: bool = False

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        if not getattr(module, "supports_gradient_checkpointing", False):
            raise InputError(
                f"{type(module).__name__} supports no gradient checkpointing, so 'checkpointing full' has no blocks to "
                "cover. Use 'checkpointing none', or name modules: checkpointing modules:PATTERN."
            )
        with warnings.catch_warnings():  # the name changes in transformers 6; this one works in all of 5
            warnings.simplefilter("ignore", FutureWarning)
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": self.use_reentrant})
        return module

    def remarks(self, graph: StepGraph) -> tuple[str, ...]:
        """Blocks that the switch did nothing for: none of their operations ran again."""
        again = {graph.module_names[graph.module[node]] for node in range(graph.num_ops) if graph.recompute[node]}
        ignored = [
            block
            for block in graph.block_names
            if not any(name == block or name.startswith(block + ".") for name in again)
        ]
        return _ignored(ignored, "they did not run, save nothing for backward, or are in evaluation mode")


# Said of every step with a frozen part that is rewritten; its plain step has this too.
INPUT_GRADIENTS = (
    "outputs of the frozen embeddings require gradients (enable_input_require_grads), as transformers and TRL set with "
    "checkpointing"
)


def let_gradients_reach_the_blocks(module: torch.nn.Module) -> None:
    """What transformers does with checkpointing on: outputs of the input embeddings require gradients, so that those of
    a frozen embedding do, too. Source: PreTrainedModel._activation_checkpointing_enable.
    """
    if _is_partly_frozen(module) and getattr(module, "main_input_name", None) == "input_ids":
        module.enable_input_require_grads()


def _is_partly_frozen(module: torch.nn.Module) -> bool:
    return not all(parameter.requires_grad for parameter in module.parameters())


def apply_checkpoint_plan(model: torch.nn.Module, plan: Mapping[str, Any]) -> None:
    """Put `torch.utils.checkpoint` (non-reentrant) around the modules of a plan, in place; for training scripts.

    `plan` is what `metapeak checkpointing --plan FILE` writes: {"checkpointed": [module paths], ...}. With "save_ops",
    a list of operators (`mm` or `aten.mm.default`), their outputs are saved inside the regions (selective
    checkpointing); with "every_second_matmul" true, of the matrix products among them only the first, third, ... of
    each region; with "use_reentrant" true the checkpoints are reentrant.
    "offloaded" lists modules whose saved tensors go to the host (torch.autograd.graph.save_on_cpu).
    Works on any nn.Module. Raises InputError for a module that the model does not have, or an operator that torch does
    not.
    """

    from metapeak.tracer.core_attention import SUFFIX, checkpoint_core_attention

    options: dict = {"use_reentrant": bool(plan.get("use_reentrant"))}
    if plan.get("save_ops"):
        _check_operators(plan["save_ops"])
        options["context_fn"] = functools.partial(
            _selective_contexts, tuple(plan["save_ops"]), bool(plan.get("every_second_matmul"))
        )

    for name in plan["checkpointed"]:
        module = _submodule(model, name.removesuffix(SUFFIX))
        if name.endswith(SUFFIX):
            checkpoint_core_attention(module, options)
        else:
            module.forward = functools.partial(_checkpointed_call, module.forward, options)
    for name in plan.get("offloaded", ()):
        module = _submodule(model, name)
        module.forward = functools.partial(_offloaded_call, module.forward)


def _submodule(model: torch.nn.Module, name: str) -> torch.nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise InputError(f"The checkpoint plan names '{name}', which {type(model).__name__} does not have.") from error


def _offloaded_call(forward, *args, **kwargs):
    import torch

    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return forward(*args, **kwargs)


def _checkpointed_call(forward, options: dict, *args, **kwargs):
    """One call under a checkpoint; keyword arguments go into the closure, since a reentrant one takes none."""
    from torch.utils.checkpoint import checkpoint

    return checkpoint(functools.partial(forward, **kwargs), *args, **options)


def _check_operators(names: Iterable[str]) -> None:
    """Raise InputError for a name that is no operator; torchtitan's may be missing in a build."""
    import torch

    for name in names:
        spellings = [spelling.split(".") for spelling in (name, f"aten.{name}")]
        found = any(len(path) > 1 and _has_path(torch.ops, path) for path in spellings)
        if not found and name not in TORCHTITAN_SAVES:
            raise InputError(f"The checkpoint plan saves '{name}', which is no operator. Write mm or aten.mm.default.")


def _has_path(root: object, path: list[str]) -> bool:
    for attribute in path:
        if not hasattr(root, attribute):
            return False
        root = getattr(root, attribute)
    return True


def _selective_contexts(save_ops: tuple[str, ...], every_second_matmul: bool):
    """The context managers of one call of a region under selective checkpointing."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    rule = SaveRule(save_ops, every_second_matmul)

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if rule.saves(str(op)) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def ignored_blocks(graph: StepGraph) -> tuple[str, ...]:
    """A sentence on the blocks that no policy can do anything for, if there are any."""
    from metapeak.strategies.recompute import regions_of

    called = set(_called(graph))
    absent = [block for block in graph.block_names if block not in called]
    idle = [block for block in graph.block_names if block in called and not regions_of(graph, [block])]
    return _ignored(absent, "not called in this step") + _ignored(idle, "they save nothing for backward")


def _ignored(blocks: list[str], reason: str) -> tuple[str, ...]:
    if not blocks:
        return ()
    named = blocks[0] if len(blocks) == 1 else f"{blocks[0]} ... {blocks[-1]} ({len(blocks)} blocks)"
    return (f"checkpointing does nothing for {named}: {reason}",)


def strategy_for(policy: Policy) -> NoOpStrategy | None:
    """How `estimate` applies a policy: the model's own switch for all blocks, the rewrite for everything else."""
    if isinstance(policy, Nothing):
        return None
    return CheckpointEveryBlock() if isinstance(policy, EveryBlock) else GradientCheckpointing(policy=policy)
