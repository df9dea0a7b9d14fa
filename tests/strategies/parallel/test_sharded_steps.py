"""Sharded steps through `simulate`: laws that hold for every rank of every layout, on a tiny model."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metapeak.reports.data import record_of
from metapeak.strategies import simulate_options
from metapeak.strategies.parallel.host_shards import host_bytes
from metapeak.tracer.errors import InputError
from metapeak.tracer.liveness import Category, Phase

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 130,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    even = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
    for name, config in (("uneven", CONFIG), ("even", CONFIG | even)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    known = {}

    def run(even=False, **options):
        key = json.dumps([even, options], sort_keys=True)
        if key not in known:
            path = folder / ("even" if even else "uneven") / "config.json"
            known[key] = simulate_options(str(path), {"seq_len": 16, "batch_size": 2, **options})
        return known[key]

    return run


def loaded(rank):
    """Bytes of parameters that are there before the first step."""
    liveness = rank.liveness
    which = (liveness.category == Category.PARAMETER) & (liveness.op_phase[liveness.birth] == Phase.LOAD)
    return int(liveness.nbytes[which].sum())


def padding(world):
    """Bytes of the rows that FSDP2 adds so that every rank has ceil(rows / world), over all parameters of the model."""
    layer = [(48, 48), (24, 48), (24, 48), (48, 48), (100, 48), (100, 48), (48, 100), (48, 1), (48, 1)]
    shapes = [(130, 48)] * 2 + [(48, 1)] + layer * CONFIG["num_hidden_layers"]
    return sum(4 * (-rows % world) * width for rows, width in shapes)


@settings(derandomize=True, deadline=None, max_examples=3)
@given(world=st.sampled_from([2, 3, 5]))
def test_shards_of_all_ranks_sum_to_the_whole_and_padding(tiny, world):
    simulation = tiny(dp_shard=world)
    assert sum(rank.count for rank in simulation.ranks) == world
    total = sum(loaded(rank) * rank.count for rank in simulation.ranks)
    assert total == simulation.model.parameter_bytes + padding(world)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_more_ranks_never_raise_a_peak(tiny, engine):
    """Where the rows divide: more of them can be padded than shards get smaller."""
    ranks = [tiny(even=True, engine=engine, dp_shard=world).worst for world in (1, 2, 8, 32)]
    peaks = [max(phase.peak_bytes for phase in rank.phases) for rank in ranks]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4


def test_replicas_cost_what_the_reducer_costs(tiny):
    plain, replicas = tiny(), [tiny(engine="ddp", dp_replicate=world) for world in (2, 64)]
    buckets = plain.model.parameter_bytes
    assert {one.worst.steady_bytes for one in replicas} == {plain.worst.steady_bytes + buckets}
    assert len({one.worst.requested_bytes for one in replicas}) == 1


def test_gradients_that_are_views_of_buckets_have_no_second_copy(tiny):
    plain, views = tiny(), tiny(engine="ddp", dp_replicate=4, gradient_as_bucket_view=True)
    copies = tiny(engine="ddp", dp_replicate=4)
    ends = [
        next(phase.end_bytes for phase in one.worst.phases if (phase.iteration, phase.phase) == (2, "backward"))
        for one in (plain, views, copies)
    ]
    assert ends[0] == ends[1] == ends[2] - plain.model.parameter_bytes


def test_at_degree_one_the_state_between_steps_is_the_plain_models(tiny):
    plain, alone = tiny().worst, tiny(dp_shard=1).worst
    assert alone.steady_bytes == plain.steady_bytes
    assert alone.requested_bytes >= plain.requested_bytes


def test_ranks_that_differ_have_a_row_each(tiny):
    simulation = tiny(dp_shard=5)
    assert [rank.count for rank in simulation.ranks] == [4, 1] or len(simulation.ranks) in (2, 3)
    assert simulation.worst is simulation.ranks[0]
    assert simulation.ranks[-1].coordinates["dp_shard"] == simulation.ranks[-1].rank
    assert simulation.ranks[-1].steady_bytes < simulation.ranks[0].steady_bytes
    record = record_of(simulation)
    assert [rank["count"] for rank in record["ranks"]] == [rank.count for rank in simulation.ranks]
    assert record["ranks"][0]["overheads"]["communicators"]["high"] > 0


def test_a_world_of_thousands_is_one_or_two_traces(tiny):
    simulation = tiny(dp_shard=4096)
    assert sum(rank.count for rank in simulation.ranks) == 4096
    assert len(simulation.ranks) <= 3


def test_gradients_wait_for_the_last_micro_batch_unless_told(tiny):
    waiting, eager = tiny(dp_shard=4, grad_accum=3), tiny(dp_shard=4, grad_accum=3, sync_each_batch=True)
    whole = waiting.model.parameter_bytes
    ends = [phase.end_bytes for phase in waiting.worst.phases if phase.phase == "backward" and phase.iteration == 2]
    synced = [phase.end_bytes for phase in eager.worst.phases if phase.phase == "backward" and phase.iteration == 2]
    assert len(ends) == 3 and len(synced) == 2
    # Whole gradients until the last backward, which leaves the shards' as every synced one does.
    assert ends[0] == ends[1]
    assert ends[0] - ends[-1] == whole - loaded(waiting.worst)
    assert synced[0] == synced[1] == ends[-1]


def test_checkpoints_of_a_sharded_step_are_real(tiny):
    plain = tiny(dp_shard=4)
    for policy in ("full", "every:2", "layers:0-1", "selective:ops=mm"):
        simulation = tiny(dp_shard=4, checkpointing=policy)
        assert simulation.worst.liveness.op_recompute.any()
        saved = [phase.end_bytes for phase in simulation.worst.phases if phase.phase == "forward"][-1]
        assert saved < [phase.end_bytes for phase in plain.worst.phases if phase.phase == "forward"][-1]


def test_checkpoints_around_flat_units_hold_the_inputs_of_frozen_blocks(tiny):
    """As transformers before 4.52 had it: reentrant, below a frozen base, a block's input lives until backward ends."""
    options = {"engine": "fsdp1", "dp_shard": 4, "method": "lora", "checkpointing": "reentrant:full"}
    inside, around = (tiny(**options, checkpoint_around_units=how).worst for how in (None, True))
    assert around.liveness.op_recompute.any()
    ends = [
        [phase.end_bytes for phase in rank.phases if phase.iteration == 2 and phase.phase == "forward"]
        for rank in (inside, around)
    ]
    assert ends[0] == ends[1]  # what it saves is the same; backward differs
    hidden = 2 * 16 * CONFIG["hidden_size"] * 4
    held = [_live_at_the_end_of_backward(rank, hidden) for rank in (inside, around)]
    # Of every block its input or that one's gradient, where without the cycle both are gone.
    assert held[1] - held[0] >= CONFIG["num_hidden_layers"]


def _live_at_the_end_of_backward(rank, nbytes):
    """How many storages of that size are alive two operations before the end of the last backward."""
    liveness = rank.liveness
    at = (liveness.op_phase == Phase.BACKWARD).nonzero()[0][-3]
    return int(((liveness.birth <= at) & (liveness.death > at) & (liveness.nbytes == nbytes)).sum())


def test_equal_elements_of_lists_are_placed_once_and_the_same(tiny, monkeypatch):
    from metapeak.tracer import distributed

    once = tiny(tp=2, dp_shard=2, optimizer="adamw")
    monkeypatch.setattr(distributed, "_one_of_each_element", lambda schema: None)
    each = tiny(tp=2, dp_shard=2, optimizer="adamw", implementation="foreach")
    for column in ("birth", "death", "nbytes", "category", "op"):
        assert (getattr(once.worst.liveness, column) == getattr(each.worst.liveness, column)).all()


def test_mixed_precision_keeps_float32_shards_and_gathers_in_half(tiny):
    simulation = tiny(dp_shard=4, weights_dtype="bf16", autocast="bf16")
    assert loaded(simulation.worst) >= simulation.model.parameters  # 4 bytes / 4 ranks
    assert simulation.model.parameter_bytes == 4 * simulation.model.parameters
    gathered = [
        row for row in simulation.graph.unsharded if simulation.worst.liveness.category[row] == Category.PARAMETER
    ]
    dtypes = {simulation.worst.liveness.dtype_names[simulation.worst.liveness.dtype[row]] for row in gathered}
    assert dtypes == {"bfloat16"}


def test_adapters_and_their_frozen_base_are_both_sharded(tiny):
    for engine in ("fsdp1", "fsdp2"):
        one, four = (tiny(engine=engine, dp_shard=world, method="lora").worst for world in (1, 4))
        assert loaded(four) <= loaded(one) / 4 + 4096
        assert four.steady_bytes < one.steady_bytes


def test_shards_on_the_host_come_and_go_unit_by_unit(tiny):
    device, host = tiny(dp_shard=4), tiny(dp_shard=4, cpu_offload=True)
    shards = loaded(device.worst)
    inputs_and_buffers = device.worst.phases[0].end_bytes - shards
    assert host.worst.steady_bytes == inputs_and_buffers + 4  # the loss
    # A copy of each shard goes to the device twice an iteration, the root's once: it stays gathered through backward.
    liveness = host.worst.liveness
    cloned = [index for index, name in enumerate(liveness.op_names) if name == "aten.clone.default"]
    first = (liveness.op_iteration[liveness.birth] == 1) & (liveness.category != Category.ACTIVATION)
    copies = np.isin(liveness.op[liveness.birth], cloned) & first & np.isin(liveness.nbytes, shard_sizes(device))
    root = 4 * (2 * -(-130 // 4) * 48 + 12)
    assert int(liveness.nbytes[copies].sum()) == 2 * shards - root
    said = next(text for text in host.how.assumptions if text.startswith("on the host of this rank"))
    assert f"parameters {shards / 2**30:.2f} GiB" in said
    batch = host.worst.host["training"]["pinned_bytes"]
    assert host.worst.host["training"]["host_bytes"] == batch + 4 * shards
    assert host_bytes(host.graph) == {"parameters": shards, "gradients": shards, "optimizer states": 2 * shards}


def shard_sizes(simulation):
    liveness = simulation.worst.liveness
    return liveness.nbytes[
        (liveness.category == Category.PARAMETER) & (liveness.op_phase[liveness.birth] == Phase.LOAD)
    ]


def test_packed_weights_in_integers_stay_whole(tiny):
    one, four = (tiny(dp_shard=world, method="qlora") for world in (1, 4))
    assert one.worst.not_shared["quantised weights"] == four.worst.not_shared["quantised weights"] > 0


def test_flat_parameters_refuse_integers_and_take_floats(tiny):
    with pytest.raises(InputError, match="--quant-storage bf16"):
        tiny(engine="fsdp1", dp_shard=4, method="qlora", weights_dtype="bf16")
    tiny(engine="fsdp1", dp_shard=4, method="qlora", weights_dtype="bf16", quant_storage="bf16")


def test_integers_of_gptq_are_sharded_where_they_are_seen_as_floats(tiny):
    options = {"method": "qlora", "quantization": "gptq4", "gptq_kernel": "triton-v2", "weights_dtype": "fp16"}
    options |= {"even": True, "optimizer": "sgd"}
    plain = tiny(**options).worst
    assert tiny(**options, quant_storage="fp16").worst.requested_bytes == plain.requested_bytes
    whole, seen = (
        tiny(**options, engine="fsdp1", dp_shard=4, quant_storage=storage).worst for storage in (None, "fp16")
    )
    # 4 bits a weight of the seven projections of two layers, and their zero points, one group of 64 or 128 inputs
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 2 * 64 * 128 + 128 * 64)
    zeros = 2 * (64 + 32 + 32 + 64 + 128 + 128 + 64)
    packed = (weights + zeros) // 2
    assert loaded(whole) - loaded(seen) == packed - packed // 4


def test_tensor_parallel_layers_are_cut_and_the_rest_stays(tiny):
    plain, cut = tiny().worst, tiny(tp=2).worst
    # Embedding, head and every projection are halves; norms (5 x 48) are whole.
    whole = 4 * 5 * 48
    assert loaded(cut) == (loaded(plain) - whole) // 2 + whole
    assert cut.not_shared["whole parameters"] >= whole


def test_heads_that_do_not_divide_are_refused(tiny):
    with pytest.raises(InputError, match=r"num_key_value_heads 2 / tp 4 = 0\.50"):
        tiny(tp=4)


def test_tensor_parallel_layers_are_sharded_further(tiny):
    both = tiny(tp=2, dp_shard=2).worst
    assert loaded(both) < loaded(tiny(tp=2).worst)
    assert both.coordinates == {"pp": 0, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 0}


def test_shards_have_replicas(tiny):
    hybrid, shards = tiny(dp_replicate=2, dp_shard=4), tiny(dp_shard=4)
    assert sum(rank.count for rank in hybrid.ranks) == 8
    assert loaded(hybrid.worst) == loaded(shards.worst)


def test_what_is_not_shared_is_a_floor(tiny):
    few, many = tiny(dp_shard=2).worst, tiny(dp_shard=4096).worst
    assert sum(few.not_shared.values()) <= few.requested_bytes
    assert many.requested_bytes >= sum(many.not_shared.values())
    assert few.not_shared["gathered parameters"] > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"wrap": "NoSuchLayer"}, "no module matches 'NoSuchLayer'"),
        ({"reshard_after_forward": "3"}, "divisor of dp_shard 4"),
        ({"optimizer": "adamw8bit"}, "cannot step the shards that fsdp2 makes"),
        ({"optimizer": "adafactor", "dp_shard": 1, "tp": 2}, "cannot step the shards that tp makes"),
        ({"precision": "bf16", "master_weights": True}, "float32 copies of whole parameters"),
        ({"checkpointing": "budget:1"}, "weighs a step on one GPU"),
        ({"cpu_offload": True, "engine": "fsdp1"}, "cpu_offload with engine fsdp1 is not predicted"),
        ({"engine": "fsdp1", "wrap": "none", "checkpointing": "full", "checkpoint_around_units": True}, "is no unit"),
    ],
)
def test_refused(tiny, options, says):
    with pytest.raises(InputError, match=says):
        tiny(**{"dp_shard": 4, **options})
