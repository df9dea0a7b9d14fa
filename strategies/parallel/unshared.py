"""What the GPUs of a job do not share: bytes of a rank that more data-parallel ranks would not make less."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from metapeak.tracer.liveness import Category, Liveness, Phase

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.graph import StepGraph


def not_shared(
    graph: StepGraph, liveness: Liveness, module: torch.nn.Module, *, logits_parts: int = 1
) -> dict[str, int]:
    """Requested bytes by what they are, largest first, when they are most: what a rank has whole, or of its own batch.

    No number of data-parallel ranks brings the peak below their sum. Logits are the activations and temporaries as wide
    as the vocabulary. Gathered parameters and unreduced gradients are of one or a few units; gradients that wait for
    the last micro-batch are of all of them. Temporaries of the optimizer are as large as the shards: they do not count.
    `logits_parts`: ranks over which logits are cut along the vocabulary.
    """
    category, nbytes = liveness.category, liveness.nbytes
    unsharded, whole = _among(graph.unsharded, category), _among(graph.whole, category)
    born = liveness.op_phase[liveness.birth]
    vocabulary = {-(-size // logits_parts) for size in _vocabulary(module)}
    wide = np.array([bool(shape) and shape[-1] in vocabulary for shape in liveness.shapes], dtype=bool)
    real = np.array([name.startswith(("float", "bfloat")) for name in liveness.dtype_names], dtype=bool)[liveness.dtype]
    loaded = (category == Category.PARAMETER) & (born == Phase.LOAD) & whole
    of_batch = np.isin(category, [Category.ACTIVATION, Category.TEMPORARY]) & (born != Phase.OPTIMIZER)
    found = {
        "logits": of_batch & wide,
        "activations": of_batch & ~wide & (category == Category.ACTIVATION),
        "temporaries": of_batch & ~wide & (category == Category.TEMPORARY),
        "quantised weights": loaded & ~real,
        "whole parameters": loaded & real,
        "gathered parameters": (category == Category.PARAMETER) & unsharded & ~loaded,
        "unreduced gradients": (category == Category.GRADIENT) & unsharded,
        "communication buffers": category == Category.COMMUNICATION,
        "buffers": category == Category.BUFFER,
        "inputs": category == Category.INPUT,
        "workspace": category == Category.WORKSPACE,
    }
    which = np.logical_or.reduce(list(found.values()))
    at = int(np.argmax(replace(liveness, nbytes=np.where(which, nbytes, 0)).live_bytes()))
    alive = (liveness.birth <= at) & (at < liveness.death)
    totals = {name: int(nbytes[rows & alive].sum()) for name, rows in found.items()}
    return {name: total for name, total in sorted(totals.items(), key=lambda item: -item[1]) if total}


# Parameters that the report names one by one before it sums the others up.
_NAMED = 8


def replicated_note(module: torch.nn.Module, whole: set[int], ranks: int) -> tuple[str, ...]:
    """The sentence that names the parameters (by id) which all `ranks` have whole, largest first, layers together."""
    sizes: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        if id(parameter) in whole:
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            sizes[pattern] = sizes.get(pattern, 0) + parameter.numel() * parameter.element_size()
    if not sizes:
        return ()
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    named = ", ".join(f"{name} {nbytes:,}" for name, nbytes in largest[:_NAMED])
    rest = sum(nbytes for _, nbytes in largest[_NAMED:])
    others = f", {len(largest) - _NAMED} others {rest:,}" if rest else ""
    return (
        f"whole on each of {ranks} tensor-parallel ranks, in bytes: {named}{others}; {sum(sizes.values()):,} in all",
    )


def _among(rows: set[int], column: np.ndarray) -> np.ndarray:
    found = np.zeros(len(column), dtype=bool)
    found[list(rows)] = True
    return found


def _vocabulary(module: torch.nn.Module) -> set[int]:
    """The widths of logits: the head's outputs, or what the config says."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    config = getattr(module, "config", None)
    sizes = {getattr(head, "out_features", None), getattr(config, "vocab_size", None)}
    return {size for size in sizes if isinstance(size, int)}
