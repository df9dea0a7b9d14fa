"""Muon for the hidden matrices, AdamW for everything else: two optimizers, stepped one after the other.

What it changes: the optimizer of the step. torch.optim.Muon takes matrices only and is meant for those of hidden
layers; embeddings, the head, norms, biases and stacks of matrices (experts in one 3-D parameter) go to
torch.optim.AdamW.
Where each byte comes from: both classes run for real. Muon keeps one momentum buffer of the gradient's dtype and works
on one matrix at a time: the interpolated gradient, its bf16 copy, and the Newton-Schulz products in bf16 (it has no
foreach kernels). AdamW is foreach.
Not modelled: Muon for convolutions flattened to matrices; sharded Muon. Arguments of the optimizer are Muon's.
Sources: torch/optim/_muon.py and its docstring's example; https://kellerjordan.github.io/posts/muon/ (embeddings and
the head go to AdamW, "empirical considerations").
"""

from __future__ import annotations

from typing import Any

import torch

from metapeak.strategies.optimizers.recipe import Recipe as BaseRecipe
from metapeak.strategies.optimizers.recipe import call, check_arguments
from metapeak.strategies.optimizers.registry import FOREACH
from metapeak.strategies.optimizers.roles import Role
from metapeak.strategies.optimizers.several import SeveralOptimizers
from metapeak.strategies.optimizers.torch_optim import make_torch_optimizer


class Recipe(BaseRecipe):
    def __init__(self, **fields: Any):
        super().__init__(**fields)
        check_arguments("torch.optim.Muon", torch.optim.Muon, self.arguments)
        self._counts = {"Muon": 0, "AdamW": 0}

    def make(self, roles: list[Role]) -> Any:
        matrices = [role.parameter for role in roles if is_hidden_matrix(role)]
        others = [role.parameter for role in roles if not is_hidden_matrix(role)]
        self._counts["Muon"] += sum(parameter.numel() for parameter in matrices)
        self._counts["AdamW"] += sum(parameter.numel() for parameter in others)
        optimizers = []
        if matrices:
            optimizers.append(call("torch.optim.Muon", torch.optim.Muon, matrices, **self.arguments))
        if others:
            optimizers.append(make_torch_optimizer(torch.optim.AdamW, others, FOREACH, {}))
        return optimizers[0] if len(optimizers) == 1 else SeveralOptimizers(optimizers)

    def remarks(self) -> tuple[str, ...]:
        return (
            f"Muon steps the 2-D weights of hidden layers ({self._counts['Muon']:,} parameters), foreach AdamW the "
            f"embeddings, the head and all that is not 2-D ({self._counts['AdamW']:,})",
        )


def is_hidden_matrix(role: Role) -> bool:
    return role.parameter.dim() == 2 and not role.is_embedding and not role.is_head
