"""Predicted live bytes of a rank equal what real processes hold, to the byte."""

import contextlib

import pytest
import torch
from torch.distributed.tensor import DTensor

from metapeak.strategies.parallel.context_parallel import ContextParallel
from metapeak.strategies.parallel.ddp import DDP
from metapeak.strategies.parallel.expert_parallel import ExpertParallel
from metapeak.strategies.parallel.fsdp1 import FSDP1
from metapeak.strategies.parallel.fsdp2 import FSDP2
from metapeak.strategies.parallel.layout import Layout
from metapeak.strategies.parallel.ranks import distribution
from metapeak.strategies.parallel.tensor_parallel import TensorParallel
from metapeak.tracer.capture import default_loss, record_training_step
from metapeak.tracer.distributed import one_rank_of
from tests.agreement.distributed.cases import CASES
from tests.agreement.distributed.real_ranks import check_phases

_STRATEGIES = {
    "fsdp2": lambda ranks, **options: [FSDP2(layout=Layout(dp_shard=ranks), **options)],
    "fsdp1": lambda ranks, **options: [FSDP1(layout=Layout(dp_shard=ranks), **options)],
    "ddp": lambda ranks, **options: [DDP(layout=Layout(dp_replicate=ranks), **options)],
    "tp": lambda ranks, **options: with_fsdp2(TensorParallel, ranks, "tp", **options),
    "cp": lambda ranks, **options: with_fsdp2(ContextParallel, ranks, "cp", **{"degree": ranks, **options}),
    "ep": lambda ranks, **options: with_fsdp2(ExpertParallel, ranks, "ep", **{"degree": ranks, **options}),
}


def with_fsdp2(strategy, ranks, axis, degree=None, **options):
    """The strategy of that degree, of all ranks alone if none is given; else FSDP2 shards over what remains."""
    if degree is None:
        return [strategy(layout=Layout(**{axis: ranks}), **options)]
    shards = ranks if axis == "ep" else ranks // degree
    layout = Layout(**{"dp_shard": shards, axis: degree})
    return [strategy(layout=layout, **options), FSDP2(layout=layout)]


# One of each mechanism; the others, and four ranks, are slow.
_DEFAULT = ("fsdp2, bf16, checkpointing", "fsdp1", "ddp", "tp", "tp, sequence and loss", "cp", "ep")


def foreach_adamw(parameters):
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    plain = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    return torch.optim.AdamW([{"params": group} for group in (sharded, plain) if group], foreach=True)


def predicted(case, world_size, rank):
    """(liveness, {(iteration, phase): PhasePeak}) of a rank on the phantom GPU."""
    strategies = _STRATEGIES[case.technique](world_size, **case.options)
    module, compute_loss = case.build("meta"), default_loss
    for strategy in strategies:
        module, compute_loss = strategy.prepare(module), strategy.loss_function(compute_loss)
    with contextlib.ExitStack() as inside:
        inside.enter_context(one_rank_of(world_size, rank))
        for strategy in strategies:
            inside.enter_context(strategy.running())
        graph, _ = record_training_step(
            module,
            case.batch(),
            foreach_adamw,
            compute_loss=compute_loss,
            distribute=distribution(strategies[0].layout, strategies),
        )
    liveness = graph.liveness()
    return liveness, {(phase.iteration, phase.phase): phase for phase in liveness.phases() if phase.iteration}


def check(name, ranks, world_size):
    case = CASES[name]
    real = ranks.run(name)
    for rank in sorted({0, world_size - 1}):
        _, phases = predicted(case, world_size, rank)
        check_phases(phases, real[rank], rank)


@pytest.mark.parametrize("name", _DEFAULT)
def test_two_real_ranks_hold_what_is_predicted(name, two_ranks):
    check(name, two_ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in _DEFAULT])
def test_two_real_ranks_hold_what_is_predicted_for_every_case(name, two_ranks):
    check(name, two_ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_four_real_ranks_hold_what_is_predicted(name, four_ranks):
    check(name, four_ranks, 4)
