"""What ZeRO-3 gathers against what it shards: why it can need more than ZeRO-2, in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from metapeak.tracer.liveness import Category, Phase

if TYPE_CHECKING:
    from metapeak.tracer.graph import StepGraph


def gathered_against_saved(graph: StepGraph, ranks: int) -> tuple[str, ...]:
    """A sentence with the bytes of gathered parameters and of buffers at the peak beside what sharding saved.

    Stage 2 has all parameters whole and no buffers to gather into; so where the first two are more than the last,
    stage 3 needs more than stage 2.
    """
    liveness = graph.liveness()
    at = int(np.argmax(liveness.live_bytes()))
    alive = (liveness.birth <= at) & (at < liveness.death)
    loaded = liveness.op_phase[liveness.birth] == Phase.LOAD
    parameter = liveness.category == Category.PARAMETER
    unsharded = np.zeros(len(liveness.category), dtype=bool)
    unsharded[list(graph.unsharded)] = True

    def total(rows) -> int:
        return int(liveness.nbytes[rows].sum())

    whole = np.zeros(len(liveness.category), dtype=bool)
    whole[list(graph.whole)] = True
    saved = total(parameter & loaded & ~whole) * (ranks - 1)
    gathered = total(parameter & unsharded & ~loaded & alive)
    buffers = total((liveness.category == Category.COMMUNICATION) & alive)
    most = "more" if gathered > saved else "less"
    return (
        f"ZeRO-3 at the peak: {_gib(gathered)} of gathered parameters (in use, prefetched, kept for reuse), "
        f"{_gib(buffers)} of buckets and gathers in flight; sharding parameters saves {_gib(saved)} against ZeRO-2, "
        f"which is {'less' if most == 'more' else 'more'} than what is gathered",
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.3f} GiB"
