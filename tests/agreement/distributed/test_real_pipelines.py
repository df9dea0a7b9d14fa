"""Live bytes of a pipeline's rank at every action, and the peak within it, equal what real processes hold."""

import contextlib
from dataclasses import replace

import pytest

from metapeak.strategies.parallel.context_parallel import ContextParallel
from metapeak.strategies.parallel.expert_parallel import ExpertParallel
from metapeak.strategies.parallel.fsdp2 import FSDP2
from metapeak.strategies.parallel.layout import Layout
from metapeak.strategies.parallel.pipeline import PipelineParallel
from metapeak.strategies.parallel.ranks import distribution
from metapeak.strategies.parallel.schedules import parse_schedule
from metapeak.strategies.parallel.tensor_parallel import TensorParallel
from metapeak.tracer.capture import record_training_step
from metapeak.tracer.distributed import one_rank_of
from metapeak.tracer.liveness import Phase
from metapeak.tracer.simulation import played_actions
from metapeak.tracer.training_loop import TrainingLoop
from tests.agreement.distributed.pipelines import PIPELINES
from tests.agreement.distributed.test_real_ranks import foreach_adamw


def _shards(layout):
    return FSDP2(layout=layout, reshard_after_forward=False)


_INSIDE = {
    "dp_shard": [_shards],
    "tp": [lambda layout: TensorParallel(layout=layout, sequence_parallel=True, loss_parallel=True)],
    "cp": [lambda layout: ContextParallel(layout=layout), _shards],
    "ep": [lambda layout: ExpertParallel(layout=layout), _shards],
}
_DEFAULT = ("2 ranks, gpipe", "2 ranks, 1f1b", "2 ranks, interleaved", "2 ranks, zbv")


def predicted(case, world_size, rank):
    """The liveness and the actions of a rank on the phantom GPU."""
    pp = 2 if case.inside else world_size
    degrees = {case.inside: 2} if case.inside else {}
    layout = Layout(pp=pp, **degrees, **({"dp_shard": 2} if case.inside == "ep" else {}))
    cuts = tuple(str(sum(case.sizes[:stage])) for stage in range(1, len(case.sizes)))
    pipeline = PipelineParallel(
        layout=layout, schedule=parse_schedule(case.schedule), microbatches=case.microbatches, split=cuts
    )
    strategies = [pipeline, *(strategy(layout) for strategy in _INSIDE.get(case.inside, ()))]
    model, batch = case.build("meta"), case.batch()
    for strategy in strategies:
        model = strategy.prepare(model)
    loop = pipeline.loop(TrainingLoop(), model, batch, strategies)
    with contextlib.ExitStack() as inside:
        inside.enter_context(one_rank_of(world_size, rank))
        for strategy in strategies:
            inside.enter_context(strategy.running())
        graph, _ = record_training_step(
            pipeline.local_stages(model, rank),
            batch,
            foreach_adamw,
            distribute=distribution(layout, strategies),
            loop=loop,
        )
    return graph.liveness(), played_actions(graph.actions, graph.liveness())


def check(name, ranks, world_size):
    case = PIPELINES[name]
    real = ranks.run(name)
    for rank in range(world_size):
        liveness, actions = predicted(case, world_size, rank)
        run = real[rank]
        ours = {(one.iteration, f"{one.stage}{one.kind}{one.microbatch}"): one for one in actions}
        optimizer = {
            (one.iteration, "optimizer"): replace(one, end_bytes=_until_next_operator(liveness, one.iteration))
            for one in liveness.phases()
            if one.phase == "optimizer"
        }
        ours |= optimizer
        # The first stage has no input to compute a gradient for: no operator runs.
        ours = {key: one for key, one in ours.items() if not key[1].startswith("0I")}
        assert [key for key in run.ends if key[1] != "start"] == sorted(ours, key=list(run.ends).index)
        assert {key: one.end_bytes for key, one in ours.items()} == {key: run.ends[key] for key in ours}, f"rank {rank}"
        peaks = {}
        for phase, _, live in run.timeline:
            peaks[phase] = max(peaks.get(phase, 0), live)
        assert {key: one.peak_bytes for key, one in ours.items()} == {key: peaks[key] for key in ours}, f"rank {rank}"


def _until_next_operator(liveness, iteration):
    """Bytes when the optimizer is over and the next step has let go of what it does not need, before its first
    operator. The mark of its start is none that a real process would run.
    """
    inside = (liveness.op_phase == Phase.OPTIMIZER) & (liveness.op_iteration == iteration)
    after = int(inside.nonzero()[0][-1]) + 1
    while after < liveness.num_ops and liveness.op_names[liveness.op[after]].startswith("mark."):
        after += 1
    return liveness.bytes_before(after)


@pytest.mark.parametrize("name", _DEFAULT)
def test_two_real_ranks_hold_what_is_predicted_at_every_action(name, two_ranks):
    check(name, two_ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PIPELINES if name.startswith("2") and name not in _DEFAULT])
def test_two_real_ranks_hold_what_is_predicted_for_every_schedule(name, two_ranks):
    check(name, two_ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PIPELINES if name.startswith("4")])
def test_four_real_ranks_hold_what_is_predicted_at_every_action(name, four_ranks):
    check(name, four_ranks, 4)
