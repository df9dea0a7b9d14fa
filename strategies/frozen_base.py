"""A frozen base: everything but the named modules keeps its values.

What it changes: `requires_grad` of the real module's parameters, before the trace.
Where each byte comes from: autograd saves and computes what the trainable parameters need; the optimizer gets those
alone. All of it is traced.
Not modelled: layers that a trainer unfreezes later in the run.
Sources: torch.nn.Module.requires_grad_.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metapeak.strategies.base import NoOpStrategy
from metapeak.tracer.errors import InputError
from metapeak.tracer.simulation import Option

if TYPE_CHECKING:
    import torch

# Names that a message lists at most.
_LISTED = 24


@dataclass(frozen=True, kw_only=True)
class FrozenBase(NoOpStrategy):
    """Train only parameters in modules that match a pattern.

    A pattern is the end of a path (`lm_head`, `self_attn.q_proj`) or has wildcards and meets a whole path
    (`*.layers.3?.*`, `*norm*`); paths of parameters count too. Raises InputError for a pattern that matches nothing.
    """

    name = "frozen-base"
    trainable: tuple[str, ...]

    def __post_init__(self):
        if not self.trainable:
            raise InputError(
                "method frozen-base needs `trainable`: names of the modules or parameters that are trained, such as "
                "--trainable lm_head,*norm*."
            )

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        paths = [name for name, _ in module.named_modules() if name]
        trained: set[int] = set()
        for pattern in self.trainable:
            roots = {path for path in paths if path_matches(path, pattern)}
            found = [
                parameter
                for name, parameter in parameters.items()
                if path_matches(name, pattern) or any(name.startswith(root + ".") for root in roots)
            ]
            if not found:
                raise InputError(
                    f"trainable: '{pattern}' matches no module with parameters and no parameter of "
                    f"{type(module).__name__}. Names that there are: {name_ends(parameters)}."
                )
            trained |= {id(parameter) for parameter in found}
        for parameter in parameters.values():
            parameter.requires_grad_(id(parameter) in trained)
        return module

    def resolved(self, module: torch.nn.Module) -> Mapping[str, Option]:
        return {
            "method": Option(value=self.name, origin="call"),
            "trainable": Option(value=list(self.trainable), origin="call"),
        }


def path_matches(path: str, pattern: str) -> bool:
    """Whether a path ends with the pattern's names, or meets a pattern with wildcards.

    >>> path_matches("model.norm", "norm"), path_matches("model.layers.0.input_norm", "norm")
    (True, False)
    >>> path_matches("model.layers.0.input_norm.weight", "*norm*")
    True
    """
    return path == pattern or path.endswith("." + pattern) or fnmatch.fnmatchcase(path, pattern)


def name_ends(parameters: Iterable[str]) -> str:
    """The last names of the modules that own these parameters, each once, for a message."""
    ends = dict.fromkeys(path.split(".")[-2] if "." in path else path for path in parameters)
    listed = list(ends)[:_LISTED]
    return ", ".join(listed) + (", ..." if len(ends) > len(listed) else "")
