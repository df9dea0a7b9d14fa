"""One liveness after another of the same model: what follows training (evaluation, generation, saving) as one life.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from metapeak.tracer.liveness import Category, Liveness, Phase


def followed_by(first: Liveness, later: Liveness, *, drops_gradients: bool = False) -> Liveness:
    """`first` with the operations of `later` after it. What `first` leaves alive lives on, but for gradients that
    whoever keeps them through `zero_grad` drops before the first operation on loaded inputs (`drops_gradients`).

    `later` was recorded on the same model built anew: the storages that it loads in phase LOAD are those that `first`
    loaded in the same order, and are not counted again; where one of them dies in `later`, it dies there. Raises
    ValueError where they are not the same.
    """
    loads, start = int((later.op_phase == Phase.LOAD).sum()), first.num_ops
    total = start + later.num_ops - loads
    death = np.where(first.death > start, total + 1, first.death)
    if drops_gradients:
        inputs = set(later.birth[later.category == Category.INPUT].tolist())
        begins = next((op for op in range(loads, later.num_ops) if op not in inputs), later.num_ops)
        dropped = (first.category == Category.GRADIENT) & (first.death > start)
        death = np.where(dropped, start + begins - loads, death)
    there = later.birth < loads
    held = np.flatnonzero(there & (later.nbytes > 0))
    same = _same_storages(first, later, held)
    dies = later.death[held] <= later.num_ops
    death[same[dies]] = np.maximum(later.death[held][dies] - loads, 0) + start

    def shifted(column, offset: int):
        return np.where(column < 0, column, column + offset)[~there]

    def operations(name: str, offset: int = 0):
        column = getattr(later, name)[loads:]
        return np.concatenate([getattr(first, name), (column + offset).astype(getattr(first, name).dtype)])

    new_death = later.death[~there]
    return replace(
        first,
        birth=np.concatenate([first.birth, later.birth[~there] - loads + start]).astype(first.birth.dtype),
        death=np.concatenate([death, np.where(new_death > later.num_ops, total + 1, new_death - loads + start)]).astype(
            first.death.dtype
        ),
        nbytes=np.concatenate([first.nbytes, later.nbytes[~there]]),
        category=np.concatenate([first.category, later.category[~there]]),
        module=np.concatenate([first.module, shifted(later.module, len(first.module_names))]),
        source=np.concatenate([first.source, shifted(later.source, len(first.source_names))]),
        dtype=np.concatenate([first.dtype, shifted(later.dtype, len(first.dtype_names))]),
        stream=_streams(first, later, ~there),
        shapes=[*first.shapes, *(later.shapes[row] for row in np.flatnonzero(~there))],
        op=operations("op", len(first.op_names)),
        op_phase=operations("op_phase"),
        op_iteration=operations("op_iteration"),
        op_module=operations("op_module", len(first.module_names)),
        op_recompute=np.concatenate([first.op_recompute, later.op_recompute[loads:]]),
        op_names=[*first.op_names, *later.op_names],
        module_names=[*first.module_names, *later.module_names],
        source_names=[*first.source_names, *later.source_names],
        dtype_names=[*first.dtype_names, *later.dtype_names],
        # These operations are not those of the training step's graph.
        op_node=None
        if first.op_node is None
        else np.concatenate([first.op_node, np.full(later.num_ops - loads, -1, dtype=first.op_node.dtype)]),
    )


def _streams(first: Liveness, later: Liveness, rows: np.ndarray) -> np.ndarray | None:
    if first.stream is None and later.stream is None:
        return None
    columns = [np.zeros(len(one.birth), dtype=np.int8) if one.stream is None else one.stream for one in (first, later)]
    return np.concatenate([columns[0], columns[1][rows]])


def _same_storages(first: Liveness, later: Liveness, rows: np.ndarray) -> np.ndarray:
    """For each of those rows of `later` the row of `first` that was loaded by the operation of the same number."""
    if first.op_node is None:
        raise ValueError("the step has no operations of a graph, so what it loads is not known")
    loaded = np.flatnonzero(first.op_phase[first.birth] == Phase.LOAD)
    by_node = {int(first.op_node[first.birth[row]]): int(row) for row in loaded}
    found = np.array([by_node.get(int(later.birth[row]), -1) for row in rows], dtype=np.int64)
    if (found < 0).any() or (first.nbytes[found] != later.nbytes[rows]).any():
        raise ValueError("what is loaded after training is not what was loaded before it")
    if (first.death[found] <= first.num_ops).any():
        raise ValueError("something that training loads does not outlive it")
    return found
