"""Adafactor as the Hugging Face Trainer makes it: transformers.optimization.Adafactor, run for real.

What it changes: nothing, the class itself is traced, with scale_parameter=False and relative_step=False.
Where each byte comes from: a matrix keeps fp32 second moments of its rows and its columns only, anything else a full
one; no first moment unless `beta1` is given. Temporaries are those of one tensor at a time: an fp32 copy of a half
precision gradient and parameter, the squared gradient, the update, its negative.
Not modelled: nothing known. torch.optim.Adafactor is another class (for-loop by default, states in the parameter's
dtype): name it by its import path.
Sources: transformers/optimization.py; transformers/trainer_optimizer.py, _get_adafactor.
"""

from __future__ import annotations

from typing import Any

from metapeak.strategies.optimizers.recipe import LEARNING_RATE, call, check_arguments
from metapeak.strategies.optimizers.recipe import Recipe as BaseRecipe
from metapeak.strategies.optimizers.roles import Role


class Recipe(BaseRecipe):
    def __init__(self, **fields: Any):
        super().__init__(**fields)
        from transformers.optimization import Adafactor

        self._class = Adafactor
        check_arguments("transformers.optimization.Adafactor", Adafactor, self.arguments)

    def make(self, roles: list[Role]) -> Any:
        relative = self.arguments.get("relative_step", False)
        defaults = {"scale_parameter": False, "relative_step": False, "lr": None if relative else LEARNING_RATE}
        arguments = {**defaults, **self.arguments}
        return call("Adafactor", self._class, [role.parameter for role in roles], **arguments)
