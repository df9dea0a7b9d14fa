"""What a parameter is for: its name in the model, whether it is an embedding or the head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

# Modules that turn the last hidden state into answers, by the last part of their name, for models that do not say which
# module that is (`get_output_embeddings`).
HEADS = frozenset({"lm_head", "embed_out", "head", "classifier", "score", "qa_outputs", "output_projection", "unembed"})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Role:
    """A parameter with its name ("" where nobody knows it) and its part in the model."""

    name: str
    parameter: torch.Tensor
    is_embedding: bool
    is_head: bool


def with_roles(
    parameters: Iterable[torch.Tensor | tuple[str, torch.Tensor]], model: torch.nn.Module | None
) -> list[Role]:
    """The role of each parameter. A weight tied between embedding and head is both."""
    names, embeddings, heads = _index(model)
    roles = []
    for given in parameters:
        name, parameter = given if isinstance(given, tuple) else (names.get(id(given), ""), given)
        roles.append(Role(name=name, parameter=parameter, is_embedding=name in embeddings, is_head=name in heads))
    return roles


def _index(model: torch.nn.Module | None) -> tuple[dict[int, str], set[str], set[str]]:
    """(first name of each parameter by its id, names of embeddings, names of heads): a tied weight has several."""
    if model is None:
        return {}, set(), set()
    found: list[tuple[str, int]] = []
    embeddings: set[int] = set()
    heads: set[int] = set()
    output = getattr(model, "get_output_embeddings", lambda: None)()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            found.append((name, id(parameter)))
            if isinstance(module, torch.nn.Embedding):
                embeddings.add(id(parameter))
        if module is output if output is not None else path.rpartition(".")[2] in HEADS:
            heads.update(id(parameter) for parameter in module.parameters())
    names: dict[int, str] = {}
    for name, key in found:
        names.setdefault(key, name)
    return (
        names,
        {name for name, key in found if key in embeddings},
        {name for name, key in found if key in heads},
    )
