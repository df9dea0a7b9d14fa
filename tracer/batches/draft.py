"""A batch being made: what its model takes, and how long its sequences may be."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from metapeak.tracer.errors import ModelConfigError
from metapeak.tracer.sequences import exact_length, most_positions, trained_length
from metapeak.tracer.spec import BatchSpec


@dataclass(kw_only=True)
class Draft:
    """A batch being made."""

    model: nn.Module
    task: str
    spec: BatchSpec
    tensors: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.config = self.model.config
        self.text_config = self.config.get_text_config()
        self.takes = frozenset(inspect.signature(self.model.forward).parameters)

    def ask_labels(self) -> None:
        if "labels" not in self.takes:
            raise ModelConfigError(
                f"Asked for a training step of {type(self.model).__name__} ({self.task}), but its forward takes no "
                f"`labels` and gives no loss. Try a class with a loss, or give your own model and loss as "
                f"`file.py:function`."
            )


def sequence_length(draft: Draft, asked: int | None, what: str = "seq_len") -> int:
    exact = exact_length(draft.model)
    if exact is not None:
        length, rule = exact
        if asked is not None and asked != length:
            raise ModelConfigError(
                f"Asked for {what} {asked}, but {type(draft.model).__name__} trains on {length} tokens only ({rule}). "
                f"Try {what} {length}."
            )
        return length
    most, trained = most_positions(draft.model), trained_length(draft.config)
    if asked is None:
        default = draft.spec.default_seq_len
        length = min(limit for limit in (default, most, trained) if limit is not None)
        if length < default:
            draft.notes.append(f"{what} is {length}, the most that the model has positions for")
        return length
    if asked < 1:
        raise ModelConfigError(f"Asked for {what} {asked}; a sequence has at least one token.")
    if most is not None and asked > most:
        raise ModelConfigError(
            f"Asked for {what} {asked}, but {type(draft.model).__name__} has {most} positions in its table of absolute "
            f"positions: a real run fails with an index error. Try {what} {most} or less."
        )
    if trained is not None and asked > trained:
        draft.notes.append(
            f"{what} {asked} is past the {trained} positions of the config; positions are computed, so it runs"
        )
    return asked


def floats(draft: Draft, shape: tuple[int, ...]) -> Tensor:
    dtype = next((p.dtype for p in draft.model.parameters() if p.dtype.is_floating_point), torch.float32)
    return torch.full(shape, 0.5, dtype=dtype)


def class_labels(draft: Draft, shape: tuple[int, ...]) -> Tensor:
    """Class indices, or floats where the config's problem is a regression or has several labels."""
    num_labels = getattr(draft.config, "num_labels", 1)
    problem = getattr(draft.config, "problem_type", None)
    if problem == "regression" or (problem is None and num_labels == 1):
        return torch.zeros(shape if num_labels == 1 else (*shape, num_labels))
    if problem == "multi_label_classification":
        return torch.zeros(*shape, num_labels)
    return (torch.arange(math.prod(shape)) % num_labels).view(shape)
