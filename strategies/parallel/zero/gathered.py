"""What ZeRO-3 gathers against what it shards: why it can need more than ZeRO-2, in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from metapeak.tracer.liveness import Category, Phase

if TYPE_CHECKING:
    from metapeak.tracer.graph import StepGraph


def gathered_against_saved(graph: StepGraph, ranks: int) -> tuple[str, ...]:
    """A sentence with the bytes of gathered parameters and of buffers at the peak beside what sharding saved.

    Stage 2 has the parameters whole: sharding them saves all of them but the rank's partition, and gathering gives that
    back. A persistent parameter is both: partitioned, and gathered always.
    """
    liveness = graph.liveness()
    at = int(np.argmax(liveness.live_bytes()))
    alive = (liveness.birth <= at) & (at < liveness.death)
    loaded = liveness.op_phase[liveness.birth] == Phase.LOAD
    parameter = liveness.category == Category.PARAMETER
    whole, unsharded = (np.isin(np.arange(len(parameter)), list(rows)) for rows in (graph.whole, graph.unsharded))

    def total(rows) -> int:
        return int(liveness.nbytes[rows].sum())

    saved = total(parameter & loaded & ~whole) * (ranks - 1)
    gathered = total(parameter & alive & (whole | (unsharded & ~loaded)))
    buffers = total((liveness.category == Category.COMMUNICATION) & alive)
    return (
        f"ZeRO-3 at the peak: {size_of(gathered)} of gathered parameters (in use, prefetched, kept for reuse, "
        f"persistent) and {size_of(buffers)} of buckets and gathers in flight; sharding parameters saves "
        f"{size_of(saved)} against ZeRO-2, so {'more' if gathered > saved else 'less'} is gathered than is saved",
    )


def size_of(nbytes: int) -> str:
    """GiB, or MiB of little."""
    return f"{nbytes / 2**30:.3f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.3f} MiB"
