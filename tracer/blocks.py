"""The repeated blocks of a model: what people mean by its layers."""

from __future__ import annotations

from torch import nn


def block_names(root: nn.Module) -> list[str]:
    """Paths of the blocks, in module order: those that transformers checkpoints (GradientCheckpointingLayer), else the
    items of the outermost ModuleLists, ModuleDicts and Sequentials with at least two items of one class. Blocks inside
    blocks are not listed.
    """
    marked = [name for name, module in root.named_modules() if _is_checkpointing_layer(module)]
    return _outermost(marked or [name for name, _ in _repeated(root)])


def _is_checkpointing_layer(module: nn.Module) -> bool:
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def _repeated(root: nn.Module):
    for path, module in root.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and len(module) >= 2:
            kinds = [type(item) for item in module.children()]
            for name, item in module.named_children():
                if kinds.count(type(item)) >= 2:
                    yield (f"{path}.{name}" if path else name), item


def _outermost(names: list[str]) -> list[str]:
    kept: list[str] = []
    for name in names:
        if not any(name.startswith(other + ".") for other in kept):
            kept.append(name)
    return kept
