"""Megatron-LM's pipeline schedules: the order of a rank's actions, played by torch's runtime.

What it changes: when a rank does what, and so how many microbatches are in flight.
Where each byte comes from: as with torch's schedules (pipeline.py); only the order is Megatron's.
Not modelled: Megatron's own communication (it makes a receive buffer for each message, where torch's stages keep one a
microbatch), deallocate_pipeline_outputs, overlap_moe_expert_parallel_comm (one more forward in the warm-up).
Sources: megatron/core/pipeline_parallel/schedules.py (get_pp_rank_microbatches: warm-up; get_schedule_table: chunks;
forward_backward_pipelining_without_interleaving, forward_backward_pipelining_with_interleaving: order and refusals).
"""

from __future__ import annotations

import functools

Action = tuple[str, int, int]  # kind (F, B), stage, microbatch


def megatron_order(rank: int, pp: int, virtual: int | None, microbatches: int, group: int) -> list[Action]:
    """What a rank does in a step: warm-up forwards, then a forward and a backward in turns, then what is left.

    `virtual` None is the schedule without interleaving. With it, `group` microbatches go through one chunk before the
    next chunk has its turn (microbatch_group_size_per_vp_stage). Raises ValueError as Megatron does.

        >>> [f"{kind}{number}" for kind, _, number in megatron_order(2, 4, None, 3, 4)]
        ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    chunks = virtual or 1
    if virtual is not None:
        _check_groups(pp, microbatches, group)
    table = _schedule_table(microbatches, chunks, group if virtual is not None else microbatches)
    forwards = [("F", rank + pp * chunk, number) for number, chunk in table]
    backwards = [("B", rank + pp * (chunks - 1 - chunk), number) for number, chunk in table]
    warm = pp - rank - 1 if virtual is None else 2 * (pp - rank - 1) + (chunks - 1) * group
    warm = min(warm, len(table))
    steady = [action for pair in zip(forwards[warm:], backwards) for action in pair]
    return [*forwards[:warm], *steady, *backwards[len(table) - warm :]]


def _check_groups(pp: int, microbatches: int, group: int) -> None:
    if not pp <= group <= microbatches:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage {group} has to lie between pp {pp} and microbatches {microbatches}"
        )
    rest = microbatches % group
    if 0 < rest < pp:
        raise ValueError(
            f"microbatches {microbatches} mod microbatch_group_size_per_vp_stage {group} = {rest}, which has to be 0 "
            f"or pp {pp} at least"
        )


def _schedule_table(microbatches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) in order: a group of microbatches through every chunk, then the next group."""
    return [
        (number, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for number in range(first, min(first + group, microbatches))
    ]


@functools.cache
def schedule_class(interleaved: bool, group: int | None) -> type:
    """A class as torch's schedules are, whose order is Megatron's; `group` None is as many as there are ranks."""
    from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

    kinds = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}

    class MegatronSchedule(_PipelineScheduleRuntime):
        def __init__(self, stages, n_microbatches, **options):
            super().__init__(stages, n_microbatches, **options)
            pp = stages[0].group_size
            virtual = len(stages) if interleaved else None
            self.pipeline_order = {
                rank: [
                    _Action(stage, kinds[kind], number)
                    for kind, stage, number in megatron_order(rank, pp, virtual, n_microbatches, group or pp)
                ]
                for rank in range(pp)
            }
            self._prepare_schedule_with_comms(self.pipeline_order)

    return MegatronSchedule
