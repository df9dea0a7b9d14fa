"""What the GPUs of a job do not share: bytes at a rank's peak that more data-parallel ranks would not make less."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from metapeak.tracer.liveness import Category, Liveness, Phase

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.graph import StepGraph


def not_shared(graph: StepGraph, liveness: Liveness, module: torch.nn.Module) -> dict[str, int]:
    """Requested bytes at the peak by what they are, largest first; only what a rank has whole, or of its own batch.

    Logits are the activations and temporaries as wide as the vocabulary. Gathered parameters and unreduced gradients
    are of one or a few units; gradients kept whole between micro-batches are of all of them.
    """
    alive = liveness.alive(liveness.peak_index())
    rows = len(graph.birth)
    traced = alive < rows  # workspaces come after the storages of the graph
    unsharded = np.isin(alive, list(graph.unsharded)) & traced
    whole = np.isin(alive, list(graph.whole)) & traced
    category, nbytes = liveness.category[alive], liveness.nbytes[alive]
    loaded = liveness.op_phase[liveness.birth[alive]] == Phase.LOAD
    of_batch = np.isin(category, [Category.ACTIVATION, Category.TEMPORARY])
    vocabulary = _vocabulary(module)
    wide = np.array(
        [bool(liveness.shapes[row]) and liveness.shapes[row][-1] in vocabulary for row in alive], dtype=bool
    )
    packed = np.array([not liveness.dtype_names[liveness.dtype[row]].startswith(("float", "bfloat")) for row in alive])
    parameter, gradient = category == Category.PARAMETER, category == Category.GRADIENT
    saved = category == Category.ACTIVATION
    found = {
        "logits": of_batch & wide & ~unsharded,
        "activations": saved & ~wide,
        "temporaries": (category == Category.TEMPORARY) & ~wide & (liveness.op_phase[liveness.birth[alive]] != 3),
        "quantised weights": parameter & loaded & whole & packed,
        "whole parameters": parameter & loaded & whole & ~packed,
        "gathered parameters": parameter & unsharded & ~whole,
        "unreduced gradients": gradient & unsharded,
        "communication buffers": category == Category.COMMUNICATION,
        "buffers": category == Category.BUFFER,
        "inputs": category == Category.INPUT,
        "workspace": category == Category.WORKSPACE,
    }
    totals = {name: int(nbytes[which].sum()) for name, which in found.items()}
    return {name: total for name, total in sorted(totals.items(), key=lambda item: -item[1]) if total}


def _vocabulary(module: torch.nn.Module) -> set[int]:
    """The widths of logits: the head's outputs, or what the config says."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    config = getattr(module, "config", None)
    sizes = {getattr(head, "out_features", None), getattr(config, "vocab_size", None)}
    return {size for size in sizes if isinstance(size, int)}
