"""Gradient checkpointing: regions keep their input and run again in backward.

What it changes: `torch.utils.checkpoint` (non-reentrant, early stop) around blocks or other modules.
Where each byte comes from: `CheckpointEveryBlock` runs the real checkpoint code, switched on the way transformers does;
`GradientCheckpointing` rewrites the recorded step (recompute.py), which equals the re-trace operation by operation.
Not modelled: selective saving inside a region, offload, reentrant and nested regions.
Sources: transformers PreTrainedModel.gradient_checkpointing_enable; torch/utils/checkpoint.py; torchtitan's option
`selective` with a number (every N-th layer, counted from one).
"""

from __future__ import annotations

import fnmatch
import functools
import re
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from metapeak.strategies.base import NoOpStrategy
from metapeak.tracer.errors import InputError

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.graph import StepGraph
    from metapeak.tracer.liveness import Liveness


class Policy(Protocol):
    """Which modules of a traced model are checkpointed. `name` is its spelling as an option."""

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


def parse_policy(text: str) -> Policy:
    """The policy of an option's value: none, full, every:N, layers:0-15,20, modules:PATTERN[,PATTERN].

    Raises InputError for anything else.

    >>> parse_policy("layers:0-2,5").numbers, parse_policy("every:2").every
    ((0, 1, 2, 5), 2)
    """
    kind, _, rest = text.partition(":")
    if text == "none":
        return Nothing()
    if text == "full":
        return EveryBlock()
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
    if kind == "modules" and rest:
        return Modules(tuple(rest.split(",")))
    raise InputError(
        f"Unknown checkpointing policy '{text}'. Known: none, full, every:N, layers:0-15,20, modules:PATTERN[,PATTERN]."
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

    def rewrite(self, liveness: Liveness, graph: StepGraph) -> Liveness:
        from metapeak.strategies.recompute import checkpointed, regions_of

        return checkpointed(graph, regions_of(graph, self.policy.modules(graph)))

    def remarks(self, graph: StepGraph) -> tuple[str, ...]:
        return ignored_blocks(graph)


@dataclass(frozen=True, kw_only=True)
class CheckpointModules(NoOpStrategy):
    """The oracle: the real `torch.utils.checkpoint` around these modules, before the trace."""

    name = "checkpointing"
    modules: tuple[str, ...]

    def prepare(self, module: torch.nn.Module) -> None:
        apply_checkpoint_plan(module, {"checkpointed": list(self.modules)})


@dataclass(frozen=True, kw_only=True)
class CheckpointEveryBlock(NoOpStrategy):
    """Every block that the model's own `gradient_checkpointing_enable` covers."""

    name = "checkpointing"
    use_reentrant: bool = False

    def prepare(self, module: torch.nn.Module) -> None:
        if not getattr(module, "supports_gradient_checkpointing", False):
            raise InputError(
                f"{type(module).__name__} supports no gradient checkpointing, so 'checkpointing full' has no blocks to "
                "cover. Use 'checkpointing none', or name modules: checkpointing modules:PATTERN."
            )
        with warnings.catch_warnings():  # the name changes in transformers 6; this one works in all of 5
            warnings.simplefilter("ignore", FutureWarning)
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": self.use_reentrant})

    def remarks(self, graph: StepGraph) -> tuple[str, ...]:
        """Blocks that the switch did nothing for: none of their operations ran again."""
        again = {graph.module_names[graph.module[node]] for node in range(graph.num_ops) if graph.recompute[node]}
        ignored = [
            block
            for block in graph.block_names
            if not any(name == block or name.startswith(block + ".") for name in again)
        ]
        return _ignored(ignored, "they did not run, save nothing for backward, or are in evaluation mode")


def apply_checkpoint_plan(model: torch.nn.Module, plan: dict) -> None:
    """Put `torch.utils.checkpoint` (non-reentrant) around the modules of a plan, in place; for training scripts.

    `plan` is what `metapeak checkpointing --plan FILE` writes: {"checkpointed": [module paths], ...}. Works on any
    nn.Module. Raises InputError for a module that the model does not have.
    """
    from torch.utils.checkpoint import checkpoint

    for name in plan["checkpointed"]:
        try:
            module = model.get_submodule(name)
        except AttributeError as error:
            raise InputError(
                f"The checkpoint plan names '{name}', which {type(model).__name__} does not have."
            ) from error
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


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
