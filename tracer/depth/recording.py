"""Recording a deep model by its first blocks, where that tells the rest; block by block where it does not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import nn

from metapeak.tracer.depth.repeats import Repeats, shortened
from metapeak.tracer.depth.splice import splice
from metapeak.tracer.graph import StepGraph

_log = logging.getLogger(__name__)
Recorded = tuple[StepGraph, dict[str, int]]


def recorded_in_depth(
    module: nn.Module, families: Sequence[Repeats], record: Callable[[], Recorded]
) -> Recorded | None:
    """What `record()` returns, recorded with the repeated blocks of `module` left out and then copied; None where that
    does not work, for whatever reason, and the whole model has to be recorded (the module is used up then).

    The answers are joined by a sentence a list of blocks.
    """
    try:
        with shortened(module, families):
            graph, answered = record()
        for family in families:
            graph = splice(graph, family)
    except Exception as error:  # one of the whole model shows again when it is recorded whole
        _log.debug("recorded whole: %s: %s", type(error).__name__, error)
        return None
    return graph, {**answered, **{_sentence(family): 1 for family in families}}


def _sentence(family: Repeats) -> str:
    recorded = family.total - family.added * family.period
    return (
        f"{recorded} of the {family.total} blocks of {family.path} were recorded; the others are copies of a block "
        "whose neighbours were recorded too and do the same (--full-trace records all)"
    )
