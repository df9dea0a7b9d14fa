"""DeepSpeed's engine through `simulate`: documented partition sizes, laws over ranks, gradients and gathers."""

import json
from fractions import Fraction

import pytest

from metapeak.strategies import simulate_options
from metapeak.tracer.errors import InputError
from metapeak.tracer.liveness import Category, Phase
from tests.strategies.parallel.test_sharded_steps import CONFIG

pytest.importorskip("deepspeed")

EVEN = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
# No bucket, nothing kept: what is left is partitions.
BARE = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
BUCKET = 4096


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    for name, config in (("uneven", CONFIG), ("even", CONFIG | EVEN)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    known = {}

    def run(stage, even=True, **options):
        key = json.dumps([stage, even, options], sort_keys=True)
        if key not in known:
            path = folder / ("even" if even else "uneven") / "config.json"
            step = {"seq_len": 16, "batch_size": 2, "precision": "bf16-mixed", "reduce_bucket_size": BUCKET}
            known[key] = simulate_options(str(path), {**step, "zero_stage": stage, **options})
        return known[key]

    return run


def loaded(simulation, category):
    """Bytes of a category that are there before the first step."""
    liveness = simulation.worst.liveness
    which = (liveness.category == category) & (liveness.op_phase[liveness.birth] == Phase.LOAD)
    return int(liveness.nbytes[which].sum())


def held(simulation):
    """Bytes between steps without inputs, rotary frequencies and numbers of a few bytes."""
    liveness = simulation.worst.liveness
    forward = (liveness.op_phase == Phase.FORWARD) & (liveness.op_iteration == 2)
    at = int(forward.argmax()) - 1
    kinds = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE, Category.COMMUNICATION)
    alive = (liveness.birth <= at) & (at < liveness.death) & (liveness.nbytes > 16)
    return {kind: int(liveness.nbytes[alive & (liveness.category == kind)].sum()) for kind in kinds}


def peak(simulation):
    return max(phase.peak_bytes for phase in simulation.worst.phases)


# Bytes a parameter of model states, of N ranks: the ZeRO paper's table (Rajbhandari et al. 2020, figure 1) with the
# gradients that DeepSpeed holds between steps: none in stages 0 to 2, its flat partition in stage 3.
TABLE = {0: (2, 0, 12), 1: (2, 0, Fraction(12, 4)), 2: (2, 0, Fraction(12, 4)), 3: (Fraction(2, 4), Fraction(2, 4), 3)}


@pytest.mark.parametrize("stage", TABLE)
def test_states_between_steps_are_the_documented_ones(tiny, stage):
    simulation = tiny(stage, dp_shard=4, **(BARE if stage == 3 else {}))
    count, found = simulation.model.parameters, held(simulation)
    kinds = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE)
    assert tuple(found[kind] for kind in kinds) == tuple(each * count for each in TABLE[stage])
    # Two buckets, because stage 3 overlaps, that are never given back; one more at a time in backward of 1 and 2.
    assert found[Category.COMMUNICATION] == (0 if stage < 3 else 2 * BUCKET)


WORLDS = [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]


@pytest.mark.parametrize("world", WORLDS)
def test_flat_partitions_of_all_ranks_are_the_whole_and_padding(tiny, world):
    """Stages 1 and 2 pad a group to 2 x ranks elements: nccl_start_alignment_factor in stage_1_and_2.py."""
    simulation = tiny(2, even=False, dp_shard=world)
    count = simulation.model.parameters
    padded = count + -count % (2 * world)
    assert loaded(simulation, Category.PARAMETER) == 2 * padded
    assert world * loaded(simulation, Category.OPTIMIZER_STATE) == 4 * padded


@pytest.mark.parametrize("world", WORLDS)
def test_partitions_of_stage_3_are_each_parameter_and_its_padding(tiny, world):
    """partition_parameters.py, _partition_param: ceil(elements / ranks) of every parameter, on every rank."""
    simulation = tiny(3, even=False, dp_shard=world, **BARE)
    layer = [48 * 48, 24 * 48, 24 * 48, 48 * 48, 100 * 48, 100 * 48, 48 * 100, 48, 48]
    padded = sum(world * -(-size // world) for size in [130 * 48] * 2 + [48] + layer * 2)
    assert world * loaded(simulation, Category.PARAMETER) == 2 * padded
    assert world * loaded(simulation, Category.GRADIENT) == 2 * padded
    assert world * loaded(simulation, Category.OPTIMIZER_STATE) == 4 * padded


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_ranks_never_raise_a_peak(tiny, stage):
    bare = BARE if stage == 3 else {}
    peaks = [peak(tiny(stage, dp_shard=world, **bare)) for world in (1, 4, 32)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3


def test_stage_3_can_need_more_than_stage_2_and_says_why(tiny):
    """Everything is used again within 1e9 elements, so all of it stays gathered beside its partitions, and the bucket
    is double."""
    large = {"dp_shard": 4, "reduce_bucket_size": 1 << 18}
    second, third = tiny(2, **large), tiny(3, **large)
    assert peak(third) > peak(second)
    (note,) = [said for said in third.how.assumptions if said.startswith("ZeRO-3 at the peak")]
    count = third.model.parameters
    gathered, saved = 2 * count, 2 * count * 3 // 4
    assert f"{gathered / 2**20:.3f} MiB of gathered parameters" in note and f"saves {saved / 2**20:.3f} MiB" in note
    assert "so more is gathered than is saved" in note
    lean = tiny(3, dp_shard=4, **BARE)
    (note,) = [said for said in lean.how.assumptions if said.startswith("ZeRO-3 at the peak")]
    assert "so less is gathered than is saved" in note


def test_live_parameters_reuse_and_prefetch_cost_what_they_gather(tiny):
    """The same with everything released at once, prefetched, and kept for reuse."""
    bare = tiny(3, dp_shard=4, **BARE)
    ahead = tiny(3, dp_shard=4, **BARE | {"stage3_prefetch_bucket_size": 30_000})
    capped = tiny(3, dp_shard=4, **BARE | {"stage3_prefetch_bucket_size": 30_000, "stage3_max_live_parameters": 0})
    kept = tiny(3, dp_shard=4, **BARE | {"stage3_max_reuse_distance": 10**9})
    assert peak(bare) == peak(capped) < peak(ahead)
    assert peak(bare) < peak(kept)


def test_whole_gradients_wait_in_stage_1_only(tiny):
    one, two = (tiny(stage, dp_shard=4, grad_accum=3) for stage in (1, 2))
    count = one.model.parameters
    ends = [
        [phase.end_bytes for phase in run.worst.phases if (phase.phase, phase.iteration) == ("backward", 2)]
        for run in (one, two)
    ]
    assert ends[0][0] == ends[0][1] and ends[1][0] == ends[1][1]
    # Stage 2 keeps the parameters that its partition begins and ends in whole.
    assert count < ends[0][0] - ends[1][0] <= 2 * count - 2 * count // 4
    assert ends[0][-1] == ends[1][-1]


def test_gradients_accumulated_in_float32_are_a_whole_copy_in_stage_1(tiny):
    """BF16_Optimizer: bf16 with float32 accumulation in stage 1; engine.py, _do_optimizer_sanity_check."""
    simulation = tiny(1, dp_shard=4, grad_accum_dtype="fp32")
    assert loaded(simulation, Category.GRADIENT) == 4 * simulation.model.parameters


@pytest.mark.slow
def test_overlap_takes_a_second_bucket_in_stage_2(tiny):
    large = {"dp_shard": 4, "reduce_bucket_size": 1 << 18}
    one, two = (tiny(2, **large, overlap_comm=overlap) for overlap in (False, True))
    assert peak(two) - peak(one) == 2 << 18


@pytest.mark.slow
def test_frozen_parameters_are_partitioned_without_gradients_or_states(tiny):
    simulation = tiny(3, dp_shard=4, method="lora", lora_rank=4, **BARE)
    trained = simulation.model.trainable_parameters
    assert held(simulation)[Category.OPTIMIZER_STATE] == 12 * trained // 4
    assert held(simulation)[Category.PARAMETER] == 2 * simulation.model.parameters // 4


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_offloaded_optimizer_is_on_the_host(tiny, stage):
    """float32 partition, its gradient and two moments; and what carries gradients over (stage 1 and 2: the largest
    parameter in float32, temp_grad_buffer_for_gpu_offload; all: a partition of bf16 on its way back)."""
    simulation = tiny(stage, dp_shard=4, offload_optimizer="cpu", **(BARE if stage == 3 else {}))
    count = simulation.model.parameters
    assert held(simulation)[Category.OPTIMIZER_STATE] == held(simulation)[Category.GRADIENT] == 0
    partition = 4 * count // 4
    assert 4 * partition <= simulation.graph.host_bytes <= 5 * partition
    assert any(said.startswith("the host holds up to") for said in simulation.how.assumptions)


def test_offloaded_parameters_leave_what_is_gathered(tiny):
    both = {"offload_optimizer": "cpu", "offload_param": "cpu"}
    here, there = tiny(3, dp_shard=4, offload_optimizer="cpu", **BARE), tiny(3, dp_shard=4, **both, **BARE)
    partition = 2 * here.model.parameters // 4
    assert held(here)[Category.PARAMETER] - held(there)[Category.PARAMETER] == partition
    assert there.graph.host_bytes >= here.graph.host_bytes


@pytest.mark.slow
def test_checkpoints_gather_again(tiny):
    plain, checkpointed = tiny(3, dp_shard=4, **BARE), tiny(3, dp_shard=4, checkpointing="full", **BARE)
    gathers = [run.graph.op_names.index("c10d._allgather_base_.default") for run in (plain, checkpointed)]
    counts = [run.graph.op.count(index) for run, index in zip((plain, checkpointed), gathers)]
    assert counts[1] > counts[0]


def test_global_state_is_given_back(tiny):
    import deepspeed
    import torch

    linear = torch.nn.functional.linear
    tiny(3, dp_shard=2, **BARE)
    assert torch.nn.functional.linear is linear
    assert deepspeed.comm.comm.cdb is None and deepspeed.utils.groups._WORLD_GROUP is None


def test_quantised_weights_are_refused(tiny):
    with pytest.raises(InputError, match="quantised weights under DeepSpeed"):
        tiny(2, dp_shard=2, method="qlora")
