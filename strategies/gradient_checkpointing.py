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

import functools
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from metapeak.strategies.base import NoOpStrategy
from metapeak.strategies.checkpoint_policies import (
    TORCHTITAN_SAVES,
    EveryBlock,
    Nothing,
    Policy,
    SaveRule,
    _called,
    policy_liveness,
)
from metapeak.tracer.errors import InputError

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.graph import StepGraph
    from metapeak.tracer.liveness import Liveness


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
    """The oracle: a plan (see `apply_checkpoint_plan`) with the real `torch.utils.checkpoint`, before the trace.

    `around_units` puts the checkpoints around the modules of the same paths that FSDP1 wrapped, so that a recompute
    gathers again; it goes behind FSDP1 then.
    """

    name = "checkpointing"
    plan: Mapping[str, Any]
    around_units: bool = False

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        let_gradients_reach_the_blocks(module)
        if not self.around_units:
            apply_checkpoint_plan(module, self.plan)
        return module

    def distribute(self, module: torch.nn.Module) -> torch.nn.Module:
        if self.around_units:
            apply_checkpoint_plan(module, {**self.plan, "checkpointed": _unit_paths(module, self.plan["checkpointed"])})
        return module


def _unit_paths(module: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """Paths of the FSDP1 units that wrap the modules of these names. Raises InputError for one that is no unit."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    infix = "_fsdp_wrapped_module."
    units = {
        path.replace(infix, ""): path
        for path, part in module.named_modules()
        if isinstance(part, FullyShardedDataParallel)
    }
    missing = [name for name in names if name not in units]
    if missing:
        raise InputError(f"checkpoint_around_units: {missing[0]} is no unit of FSDP. Checkpoint what --wrap names.")
    return [units[name] for name in names]


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
    from metapeak.strategies.regions import regions_of

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
