"""Units: the modules whose parameters are gathered together, and which parameters are cast up before sharding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from metapeak.tracer.errors import InputError

if TYPE_CHECKING:
    import torch

# What of the parameters becomes float32 before they are sharded: accelerate 1.15 casts those that are trained,
# accelerate 1.10 all of them with FSDP2, axolotl none.
UPCASTS = ("none", "trainable", "all")
# Names of wrap that are no patterns.
BLOCKS, ACCELERATE, ROOT_ONLY = "blocks", "accelerate", "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Modules that one group gathers. `reshard` None leaves it to the option."""

    modules: tuple[str, ...]
    reshard: bool | None = None


def units_of(module: torch.nn.Module, wrap: Sequence[str]) -> list[Unit]:
    """The units inside the root, inner ones first; what none of them holds is the root's.

    `wrap` is ("blocks",), ("none",) for the root alone, ("accelerate",) for the units of accelerate 1.15, or patterns
    of module paths and class names. Raises InputError for a pattern that matches nothing.
    """
    from metapeak.tracer.blocks import block_names

    if tuple(wrap) == (ROOT_ONLY,):
        return []
    if tuple(wrap) == (BLOCKS,):
        return [Unit(modules=(name,)) for name in block_names(module)]
    if tuple(wrap) == (ACCELERATE,):
        return _units_of_accelerate(module)
    return [Unit(modules=(name,)) for name in matching_modules(module, wrap)]


def _units_of_accelerate(module: torch.nn.Module) -> list[Unit]:
    """Blocks by `_no_split_modules`, the embedding, and [final norm, head] without resharding; tied weights join these.

    Source: accelerate 1.15 utils/fsdp_utils.py (fsdp2_prepare_model, _find_final_norm).
    """
    from metapeak.tracer.blocks import block_names

    names = {id(part): name for name, part in reversed(list(module.named_modules()))}
    classes = set(getattr(module, "_no_split_modules", None) or ())
    blocks = [name for name, part in module.named_modules() if type(part).__name__ in classes] or block_names(module)
    units = [Unit(modules=(name,)) for name in blocks]
    embedding = getattr(module, "get_input_embeddings", lambda: None)()
    head = getattr(module, "get_output_embeddings", lambda: None)()
    tied = head is not None and getattr(embedding, "weight", None) is getattr(head, "weight", 0)
    if embedding is not None and not tied:
        units.append(Unit(modules=(names[id(embedding)],)))
    tail = [_final_norm(module), embedding, head] if tied else [_final_norm(module), head]
    tail_names = tuple(names[id(part)] for part in tail if part is not None)
    return units + ([Unit(modules=tail_names, reshard=False)] if tail_names else [])


def _final_norm(module: torch.nn.Module) -> torch.nn.Module | None:
    from accelerate.utils import fsdp_utils

    return fsdp_utils._find_final_norm(module)


def trained_leaves(module: torch.nn.Module) -> list[str]:
    """Paths of the modules without children whose weight is trained, where others are frozen: units of their own.

    A flat parameter holds one dtype and, without `use_orig_params`, one requires_grad. Source: peft 0.21 utils/other.py
    (fsdp_auto_wrap_policy), which the Hugging Face Trainer sets for PEFT models.
    """
    if all(parameter.requires_grad for parameter in module.parameters()):
        return []
    return [
        name
        for name, part in module.named_modules()
        if not list(part.children()) and getattr(getattr(part, "weight", None), "requires_grad", False)
    ]


def matching_modules(module: torch.nn.Module, patterns: Sequence[str]) -> list[str]:
    """Paths of the modules that a pattern matches (shell wildcards, on the path or the class name), inner ones first.

    Raises InputError for a pattern that matches nothing, with the classes that there are.
    """
    found: set[str] = set()
    for pattern in patterns:
        matches = {
            name
            for name, part in module.named_modules()
            if name and (fnmatchcase(name, pattern) or fnmatchcase(type(part).__name__, pattern))
        }
        if not matches:
            classes = sorted({type(part).__name__ for _, part in module.named_modules()})
            raise InputError(f"wrap: no module matches {pattern!r}. Classes in this model: {', '.join(classes)}.")
        found |= matches
    return sorted(found, key=lambda name: (-name.count("."), name))


def cast_up(module: torch.nn.Module, which: str) -> None:
    """Make parameters float32, in place: those that are trained, or all of floating point; Params4bit stay."""
    import torch

    if which == "none" or any(type(parameter).__name__ == "Params4bit" for parameter in module.parameters()):
        return
    for parameter in module.parameters():
        if parameter.is_floating_point() and (which == "all" or parameter.requires_grad):
            parameter.data = parameter.data.to(torch.float32)
