"""What every kind of optimizer shares: its class, implementation and arguments, and how a class is called with them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from metapeak.strategies.optimizers.roles import Role
from metapeak.tracer.errors import InputError

# For classes whose learning rate has no default. Any number gives the same bytes.
LEARNING_RATE = 1e-3


class Recipe:
    """How to make one kind of optimizer. The libraries of this room fill in `make` and what there is to say."""

    def __init__(self, *, class_name: str, implementation: str | None, arguments: dict, state_dtype: str | None):
        self.class_name, self.implementation = class_name, implementation
        self.arguments, self.state_dtype = arguments, state_dtype

    def make(self, roles: list[Role]) -> Any:
        raise NotImplementedError

    def assumptions(self) -> tuple[str, ...]:
        return ()

    def remarks(self) -> tuple[str, ...]:
        return ()


def check_arguments(what: str, function: Any, arguments: Mapping[str, Any]) -> None:
    """Raise InputError when a class or function has no parameter of such a name."""
    known = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in arguments:
        if name not in known:
            listed = ", ".join(key for key in known if key not in ("self", "params", "roles", "foreach", "fused"))
            raise InputError(f"{what} takes no argument '{name}'. It takes: {listed}.")


def call(what: str, function: Any, *positional: Any, **arguments: Any) -> Any:
    """What the class returns; its own refusal of a value becomes an InputError."""
    try:
        return function(*positional, **arguments)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise InputError(f"{what} cannot be made: {error}.") from error


def needs_lr(function: Any) -> bool:
    """Whether a class wants a learning rate and has no default for it."""
    lr = inspect.signature(function).parameters.get("lr")
    return lr is not None and lr.default in (inspect.Parameter.empty, None)
