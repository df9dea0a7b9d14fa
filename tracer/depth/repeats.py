"""The repeated blocks of a model: which are alike, how many of them a recording needs, and the model without the rest.

Note [How many are kept]
    Where all blocks are alike: three below the one that is copied, it, and five above, of which two are compared with
    it; what reaches over two blocks (a prefetch of FSDP) is then seen, and a reference to the first block told from one
    to a neighbour. Where kinds alternate (sliding and full attention): five groups of a period, the second is copied.
    Blocks before and after the run are kept as they are.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

MAX_PERIOD = 8
# The group of rows that belong to none.
NONE = -(1 << 20)
# Attributes in which equal blocks differ: their place.
_PLACES = frozenset({"layer_idx", "layer_id", "layer_number", "idx", "index", "block_idx", "layer_index"})
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Blocks `path`.0, `path`.1, ... of a shortened model: from `start` on, groups of `period` blocks repeat.

    Group `template` is copied `added` times; it is compared with the `checked` groups after it. References to groups
    not further away than `reach` are taken for relative ones. `kept`: the blocks of the whole model that stay, of
    `total`.
    """

    path: str
    start: int
    period: int
    template: int
    checked: int
    reach: int
    added: int
    kept: tuple[int, ...]
    total: int

    @functools.cached_property
    def _pattern(self) -> re.Pattern:
        # Wrappers (FSDP1's, those of checkpoints) put a component of their own between those of the path.
        between = r"\.(?:_\w+\.)*"
        path = between.join(map(re.escape, self.path.split(".")))
        return re.compile(rf"((?:^|\.){path}{between})(\d+)(?=\.|$)")

    def group_in(self, name: str) -> int:
        """The group that a module's or parameter's path lies in, NONE for none."""
        found = self._pattern.search(name)
        return (int(found[2]) - self.start) // self.period if found else NONE

    def without_place(self, name: str) -> str:
        """A path that blocks in the same place of their groups have in common."""
        return self._pattern.sub(lambda found: f"{found[1]}{(int(found[2]) - self.start) % self.period}", name, count=1)

    def renamed(self, name: str, by: int) -> str:
        """The same path `by` groups further."""
        if by == 0:
            return name
        return self._pattern.sub(lambda found: f"{found[1]}{int(found[2]) + by * self.period}", name, count=1)


def repeats_of(root: nn.Module) -> tuple[Repeats, ...]:
    """What can be left out of a model's lists of blocks, the outermost lists only; empty where that gains nothing."""
    found: list[Repeats] = []
    for path, module in root.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(other.path + ".") for other in found):
            continue
        configs = _configs_around(root, path)
        if len(module) < 8 or any(_chooses_blocks(config, len(module)) for config in configs):
            continue
        where, _, name = path.rpartition(".")
        if _asks_for_numbers(type(root.get_submodule(where)), name):
            continue
        kinds = [_kind(block) for block in module]
        for config in configs[:1]:
            lists = _lists(config, len(module))
            kinds = [(kind, *(repr(items[at]) for items in lists.values())) for at, kind in enumerate(kinds)]
        repeats = _shortest(path, kinds)
        if repeats is not None:
            found.append(repeats)
    return tuple(found)


def _shortest(path: str, kinds: Sequence[Any]) -> Repeats | None:
    """The way to leave most blocks out, None where none is worth it."""
    best, total = None, len(kinds)
    for period in range(1, min(MAX_PERIOD, total // 6) + 1):
        start, end = _longest_run(kinds, period)
        groups = (end - start) // period
        template, checked, reach, needed = (3, 2, 2, 9) if period == 1 else (1, 1, 1, 5)
        added = groups - needed
        if added < 1 or (best is not None and added * period <= best.added * best.period):
            continue
        first = start + (template + 1) * period  # the blocks after the template are those left out
        kept = (*range(first), *range(first + added * period, total))
        best = Repeats(
            path=path,
            start=start,
            period=period,
            template=template,
            checked=checked,
            reach=reach,
            added=added,
            kept=kept,
            total=total,
        )
    return best if best is not None and total - len(best.kept) >= 3 else None


def _longest_run(kinds: Sequence[Any], period: int) -> tuple[int, int]:
    """(first, end) of the longest stretch of blocks in which each is like the one `period` before it."""
    best, begin = (0, 0), 0
    for at in range(period, len(kinds) + 1):
        if at == len(kinds) or kinds[at] != kinds[at - period]:
            if at - begin > best[1] - best[0]:
                best = (begin, at)
            begin = at + 1 - period
    return best


def _kind(module: nn.Module) -> tuple:
    """What two blocks have in common that do the same: classes, parameters, settings; not their place."""
    attributes = tuple(
        (name, value if type(value) in _PLAIN else _plain_items(value))
        for name, value in sorted(vars(module).items())
        if name not in _PLACES and not name.startswith("_")
    )
    tensors = tuple(
        (name, None if tensor is None else (type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
    )
    hooks = (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
    return (
        type(module),
        attributes,
        tensors,
        hooks,
        tuple((name, _kind(child)) for name, child in module._modules.items() if child is not None),
    )


def _plain_items(value: Any) -> Any:
    """A tuple or list of plain values as it is, anything else by its type."""
    if isinstance(value, (tuple, list)) and all(type(item) in _PLAIN for item in value):
        return tuple(value)
    return getattr(value, "__qualname__", None) or type(value).__qualname__


@functools.cache
def _asks_for_numbers(owner: type[nn.Module], name: str) -> bool:
    """Whether a class that runs its blocks `self.name` one after the other uses their numbers for more than looking up
    what a config or a cache has for each; or whether that cannot be read.
    """
    try:
        lines = inspect.getsource(owner).split("\n")
    except (OSError, TypeError):
        return True
    loop = re.compile(rf"(\s*)for \(?(\w+), .* in enumerate\(self\.{name}\b")
    for at, line in enumerate(lines):
        found = loop.match(line)
        if found:
            inside = itertools.takewhile(functools.partial(_is_deeper, len(found[1])), lines[at + 1 :])
            number = re.compile(rf"\b{found[2]}\b")
            if any(number.search(line) and not _OF_EACH.search(line) for line in inside):
                return True
    return False


def _is_deeper(indent: int, line: str) -> bool:
    return not line.strip() or len(line) - len(line.lstrip()) > indent


# What a line looks up by the number of a block without making a difference between blocks of a kind.
_OF_EACH = re.compile(
    r"config\.\w+\[|past_key|head_mask|all_\w+|cache|logger|len\(deepstack_visual|deepstack_visual_embeds\["
)


# -- configs -----------------------------------------------------------------------------------------------------------


def _configs_around(root: nn.Module, path: str) -> list[Any]:
    """The configs of the modules around a list of blocks, the innermost first."""
    configs: list[Any] = []
    parts = path.split(".")[:-1]
    for depth in range(len(parts), -1, -1):
        config = getattr(root.get_submodule(".".join(parts[:depth])), "config", None)
        if config is not None and hasattr(config, "__dict__") and all(config is not one for one in configs):
            configs.append(config)
    return configs


def _lists(config: Any, length: int) -> dict[str, list]:
    """The lists of a config that have an item a block."""
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == length and not name.startswith("_")
    }


def _chooses_blocks(config: Any, length: int) -> bool:
    """Whether a config names single blocks by their number, of which a forward could take something."""
    for name, value in vars(config).items():
        if not isinstance(value, (list, tuple)) or not value or len(value) >= length or name.startswith("_"):
            continue
        if all(type(item) is int and item < length for item in value) and list(value) == sorted(set(value)):
            return True
    return False


# -- the shortened model -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shortened(root: nn.Module, families: Sequence[Repeats]) -> Iterator[None]:
    """While inside, `root` has only the blocks that are kept, and its configs say so."""
    with contextlib.ExitStack() as undo:
        configs = {id(module.config): module.config for module in root.modules() if hasattr(module, "config")}
        for config in [*configs.values()]:
            configs.update((id(one), one) for one in vars(config).values() if hasattr(one, "to_dict"))
        for family in families:
            where, _, name = family.path.rpartition(".")
            parent = root.get_submodule(where)
            whole = parent._modules[name]
            short = copy.copy(whole)
            short._modules = {str(at): whole[block] for at, block in enumerate(family.kept)}
            for at, block in enumerate(family.kept):
                _number(whole[block], block, at, undo)
            parent._modules[name] = short
            undo.callback(parent._modules.__setitem__, name, whole)
            for config in configs.values():
                if hasattr(config, "__dict__"):
                    _shorten_config(config, family, undo)
        yield


def _number(block: nn.Module, before: int, after: int, undo: contextlib.ExitStack) -> None:
    """The parts of a block that know its number (for the cache) learn the new one."""
    for part in block.modules():
        for name in _PLACES.intersection(vars(part)):
            if type(vars(part)[name]) is int and vars(part)[name] == before:
                setattr(part, name, after)
                undo.callback(setattr, part, name, before)


def _shorten_config(config: Any, family: Repeats, undo: contextlib.ExitStack) -> None:
    values = vars(config)
    for name, value in [*values.items()]:
        if type(value) is int and value == family.total and "layer" in name:
            values[name] = len(family.kept)
        elif isinstance(value, (list, tuple)) and len(value) == family.total and not name.startswith("_"):
            values[name] = type(value)(value[block] for block in family.kept)
        else:
            continue
        undo.callback(values.__setitem__, name, value)
