"""Any class by its import path, `package.Class` or `file.py:Class`, run for real on the phantom GPU.

What it changes: nothing, the class itself is traced.
Where each byte comes from: the class's own operators. A class that takes `foreach` or `fused` gets the one that is
asked for, or foreach, as CUDA would pick.
Not modelled: kernels outside the dispatcher (CUDA extensions, Triton). What needs values is refused with the operator.
Source: the class.
"""

from __future__ import annotations

import inspect
from typing import Any

from metapeak.strategies.optimizers.recipe import LEARNING_RATE, call, check_arguments, needs_lr
from metapeak.strategies.optimizers.recipe import Recipe as BaseRecipe
from metapeak.strategies.optimizers.registry import FOREACH, FUSED, LOOP
from metapeak.strategies.optimizers.roles import Role
from metapeak.tracer.errors import InputError
from metapeak.tracer.user_function import import_function


class Recipe(BaseRecipe):
    def __init__(self, **fields: Any):
        super().__init__(**fields)
        self._class = import_optimizer(self.class_name)
        self._words = {word for word in (FOREACH, FUSED) if word in inspect.signature(self._class).parameters}
        has = [word for word in (FOREACH, FUSED) if word in self._words] + [LOOP]
        self.implementation = self.implementation or has[0]
        if self.implementation not in has:
            raise InputError(
                f"Optimizer {self.class_name} has no {self.implementation} implementation. It has: {', '.join(has)}."
            )
        check_arguments(self.class_name, self._class, self.arguments)

    def make(self, roles: list[Role]) -> Any:
        arguments = dict(self.arguments)
        if self.implementation in self._words:
            arguments[self.implementation] = True
        elif FOREACH in self._words:
            arguments[FOREACH] = False
        if needs_lr(self._class):
            arguments.setdefault("lr", LEARNING_RATE)
        optimizer = call(self.class_name, self._class, [role.parameter for role in roles], **arguments)
        for attribute in ("step", "zero_grad", "state", "param_groups"):
            if not hasattr(optimizer, attribute):
                raise InputError(f"{self.class_name} is no optimizer: what it returns has no '{attribute}'.")
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise InputError(f"{self.class_name}.step() needs a closure, which the traced step does not have.")
        return optimizer


def import_optimizer(path: str) -> Any:
    """The class that a path names. Raises InputError with what was looked for."""
    where, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not where or not name:
        raise InputError(f"Optimizer '{path}' is no import path: give package.Class or file.py:Class.")
    return import_function(where, name)
