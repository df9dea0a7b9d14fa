"""Pipeline schedules by name: how many stages a rank has, where they lie, and what the schedule class refuses.

The classes are torch's; Megatron-LM's orders have classes of their own over torch's runtime (megatron_schedules.py).
Sources: torch 2.13 distributed/pipelining/schedules.py (get_schedule_class and the classes), _utils.py
(generate_stage_to_rank_mapping: loop, v).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from metapeak.strategies.parallel.megatron_schedules import schedule_class
from metapeak.tracer.errors import InputError, UnknownName

# name -> (torch's class, stages a rank (None: any number), whether a rank has the k-th stage from both ends)
_SCHEDULES = {
    "gpipe": ("GPipe", 1, False),
    "1f1b": ("1F1B", 1, False),
    "interleaved-1f1b": ("Interleaved1F1B", None, False),
    "looped-bfs": ("LoopedBFS", None, False),
    "interleaved-zero-bubble": ("InterleavedZeroBubble", None, False),
    "zbv": ("ZBVZeroBubble", 2, True),
    "dualpipev": ("DualPipeV", 2, True),
    "megatron-1f1b": ("Megatron", 1, False),
    "megatron-interleaved": ("Megatron", None, False),
}
_GROUPED = "megatron-interleaved"  # takes the number of microbatches in a group, too
SCHEDULES = tuple(
    name if stages else f"{name}:V" + (":N" if name == _GROUPED else "") for name, (_, stages, _) in _SCHEDULES.items()
)
DEFAULT_SCHEDULE = "1f1b"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A schedule with `virtual` stages a rank; `group` is Megatron's microbatch_group_size_per_vp_stage (None: pp)."""

    name: str
    virtual: int = 1
    group: int | None = None

    @property
    def is_megatron(self) -> bool:
        """Whether the order is Megatron-LM's."""
        return self.name.startswith("megatron")

    @property
    def kind(self) -> type:
        """The class of torch, or one like it."""
        from torch.distributed.pipelining.schedules import get_schedule_class

        if self.is_megatron:
            return schedule_class(self.name == _GROUPED, self.group)
        return get_schedule_class(_SCHEDULES[self.name][0])

    @property
    def is_single(self) -> bool:
        """Whether its class takes one stage a rank, and not a list."""
        return self.name in ("gpipe", "1f1b")

    def stages_of(self, rank: int, pp: int) -> list[int]:
        """The stages of a rank, in the order in which a microbatch meets them.

        >>> parse_schedule("interleaved-1f1b:2").stages_of(1, 4), parse_schedule("zbv").stages_of(1, 4)
        ([1, 5], [1, 6])
        """
        if _SCHEDULES[self.name][2]:
            return [rank, 2 * pp - 1 - rank]
        return [rank + pp * round_ for round_ in range(self.virtual)]

    def check(self, pp: int, microbatches: int) -> None:
        """Raise InputError with the words of torch's own class where that refuses the numbers."""
        try:
            self.orders(pp, microbatches)
        except ValueError as error:
            raise InputError(
                f"schedule {self.name} with pp {pp}, {pp * self.virtual} stages, {microbatches} microbatches: {error}"
            ) from error

    def orders(self, pp: int, microbatches: int) -> dict[int, list]:
        """The actions of every rank as the class makes them, bubbles as None. Raises ValueError as the class."""
        stages = [
            SimpleNamespace(stage_index=index, num_stages=pp * self.virtual, group_size=pp, group_rank=0, submod=None)
            for index in self.stages_of(0, pp)
        ]
        return self.kind(stages[0] if self.is_single else stages, microbatches).pipeline_order


ONE_FORWARD_ONE_BACKWARD = Schedule(name=DEFAULT_SCHEDULE)


def parse_schedule(text: str) -> Schedule:
    """The schedule of a text as 1f1b or interleaved-1f1b:2. Raises UnknownName with those known, or InputError."""
    name, _, number = text.lower().partition(":")
    number, _, group = number.partition(":") if name == _GROUPED else (number, "", "")
    if name not in _SCHEDULES:
        raise UnknownName("schedule", text, SCHEDULES)
    fixed = _SCHEDULES[name][1]
    if not number:
        return Schedule(name=name, virtual=fixed or 2)
    if not number.isdigit() or int(number) < 1:
        raise InputError(f"schedule {text!r}: virtual stages are a whole number from 1 on, as in {name}:2.")
    if fixed is not None and int(number) != fixed:
        raise InputError(f"schedule {name} has {fixed} stage{'s' if fixed > 1 else ''} a rank, not {number}.")
    if group and not group.isdigit():
        raise InputError(f"schedule {text!r}: a group of microbatches is a whole number, as in {name}:2:8.")
    return Schedule(name=name, virtual=int(number), group=int(group) if group else None)
