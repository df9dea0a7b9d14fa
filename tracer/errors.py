"""What can go wrong, as one tree.

MetapeakError                  base of everything raised on purpose; its text is meant for the user
├── InputError                 what was asked cannot be used (exit code 1)
│   ├── ModelNotFound          no such id, file or function
│   ├── ModelConfigError       the config exists but describes no model that can be built
│   └── UnknownName            a name that no catalogue has; carries the nearest ones
└── TraceError                 the model was built but its step cannot be traced (exit code 1)
    └── DataDependentError     a size or a branch depends on values that nobody can know without running the model
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MetapeakError(Exception):
    """Base class: the message says what was asked, what was found and what to try."""

    def __reduce__(self):
        """As it is, whatever the constructor takes: errors come back from other processes."""
        return _again, (type(self), self.args, self.__dict__)


class InputError(MetapeakError):
    """What was asked cannot be used."""


class ModelNotFound(InputError):
    """The model reference leads to no config and no function."""


class ModelConfigError(InputError):
    """The config was found but no model can be built or run from it."""


class UnknownName(InputError):
    """A name that a closed catalogue does not have.

    Arguments: what kind of thing was named, the name, and the known names (the nearest ones are listed).
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = ""):
        known = list(known)
        by_lower = {candidate.lower(): candidate for candidate in known}
        near = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=5, cutoff=0.5)]
        listed = (
            f"Nearest known: {', '.join(near)}."
            if near
            else f"Known: {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}."
        )
        super().__init__(f"Unknown {kind} '{name}'. {listed}{' ' + hint if hint else ''}")
        self.name, self.nearest = name, near


class TraceError(MetapeakError):
    """The step of a model that could be built cannot be traced.

    Attributes: op (overload name or None), module (path inside the model, "" for its root), op_index.
    """

    def __init__(self, reason: str, *, op: str | None = None, module: str | None = None, op_index: int | None = None):
        where = f"{op or 'an operation'}" + (f" in module '{module}'" if module else "")
        index = f" (operation {op_index} of the step)" if op_index is not None else ""
        super().__init__(f"The step cannot be traced: {where}{index}: {reason}")
        self.reason, self.op, self.module, self.op_index = reason, op, module, op_index


class DataDependentError(TraceError):
    """A size or branch of the step depends on values that exist only on a real device."""


def _again(kind: type[MetapeakError], arguments: tuple, attributes: dict) -> MetapeakError:
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(attributes)
    return error
