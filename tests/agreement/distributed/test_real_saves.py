"""What a rank holds while it saves equals what real processes hold, to the byte."""

import contextlib

import pytest

from metapeak.strategies.lifecycle import lived_on
from metapeak.strategies.parallel.ranks import distribution
from metapeak.tracer.capture import default_loss, record_training_step
from metapeak.tracer.distributed import one_rank_of
from metapeak.tracer.life import Evaluation, Life, record_life
from metapeak.tracer.training_loop import TrainingLoop
from tests.agreement.distributed.cases import SAVES
from tests.agreement.distributed.real_ranks import check_phases
from tests.agreement.distributed.test_real_ranks import _STRATEGIES, foreach_adamw

# One of each way; the others, and three ranks, are slow.
_DEFAULT = ("fsdp2, save full", "fsdp2, save full-on-device", "fsdp1, evaluation, save full")


def predicted(case, world_size, rank):
    """Peaks and ends of a rank's phases, two steps and a save."""
    strategies = _STRATEGIES[case.technique](world_size, **case.options)
    distribute = distribution(strategies[0].layout, strategies)

    def prepared():
        module = case.build("meta")
        for strategy in strategies:
            module = strategy.prepare(module)
        return module

    with contextlib.ExitStack() as inside:
        inside.enter_context(one_rank_of(world_size, rank))
        for strategy in strategies:
            inside.enter_context(strategy.running())
        step, _ = record_training_step(prepared(), case.batch(), foreach_adamw, distribute=distribute)
        evaluation = Evaluation(batches=1) if case.evaluate else None
        later, _ = record_life(
            prepared(), Life(evaluation=evaluation, save=case.save), batch=case.batch(), prompt=None,
            compute_loss=default_loss, distribute=distribute, loop=TrainingLoop(), iteration=2,
        )  # fmt: skip
    return lived_on(step.liveness(), later, strategies).phases()


def check(name, ranks, world_size):
    case = SAVES[name]
    real = ranks.run(name)
    for rank in sorted({0, world_size - 1}):
        phases = {(phase.iteration, phase.phase): phase for phase in predicted(case, world_size, rank)[1:]}
        check_phases(phases, real[rank], rank)


@pytest.mark.parametrize("name", _DEFAULT)
def test_two_real_ranks_save_as_predicted(name, two_ranks):
    check(name, two_ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SAVES if name not in _DEFAULT])
def test_two_real_ranks_save_as_predicted_in_every_way(name, two_ranks):
    check(name, two_ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVES)
def test_three_real_ranks_save_as_predicted(name, three_ranks):
    check(name, three_ranks, 3)
