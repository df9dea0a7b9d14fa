"""The options of `parallel`: which engine they stand for, what it makes of a precision, and what is refused."""

import pytest

from metapeak.strategies.parallel.ddp import DDP
from metapeak.strategies.parallel.fsdp1 import FSDP1
from metapeak.strategies.parallel.fsdp2 import FSDP2
from metapeak.strategies.parallel.layout import Layout
from metapeak.strategies.parallel.tensor_parallel import TensorParallel
from metapeak.strategies.request import step_spec, strategies_of
from metapeak.strategies.settings import options_of, resolve
from metapeak.tracer.errors import InputError, UnknownName


def resolved(**values):
    return resolve(options_of(values, "call"))


def strategies(**values):
    return strategies_of(resolved(**values))


def refusal(**values):
    with pytest.raises(InputError) as refused:
        strategies(**values)
    return str(refused.value)


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({}, []),
        ({"dp_shard": 8}, [FSDP2]),
        ({"dp_shard": 1}, [FSDP2]),
        ({"dp_replicate": 4}, [DDP]),
        ({"engine": "ddp", "dp_shard": 4}, [DDP]),
        ({"engine": "fsdp1", "dp_shard": 4}, [FSDP1]),
        ({"tp": 2}, [TensorParallel]),
        ({"tp": 2, "dp_shard": 4}, [TensorParallel, FSDP2]),
        ({"zero_stage": 3, "dp_shard": 8}, [FSDP2]),
    ],
)
def test_the_engine_that_options_stand_for(values, kinds):
    assert [type(strategy) for strategy in strategies(**values)] == kinds


def test_a_nested_mapping_is_the_same():
    nested = strategies(parallel={"engine": "fsdp2", "dp_shard": 4, "dp_replicate": 2, "tp": 1, "pp": 1})
    assert nested == strategies(dp_shard=4, dp_replicate=2, engine="fsdp2")


def test_ddp_has_replicas_whatever_their_axis_is_called():
    assert strategies(engine="ddp", dp_shard=4)[0].layout == Layout(dp_replicate=4)


def test_zero_stages_reshard_as_they_shard():
    assert strategies(zero_stage=3, dp_shard=8)[0].reshard_after_forward is None
    assert strategies(zero_stage=2, dp_shard=8)[0].reshard_after_forward is False


def test_fsdp2_casts_parameters_where_a_region_would_cast_operators():
    options = resolved(dp_shard=8, precision="bf16-mixed")
    assert step_spec(options).autocast is None
    (fsdp,) = strategies_of(options)
    assert (fsdp.param_dtype, fsdp.reduce_dtype, fsdp.output_dtype, fsdp.upcast) == (*["bfloat16"] * 3, "trainable")
    assert "accelerate" in options["autocast"].origin


def test_fsdp1_does_both():
    options = resolved(engine="fsdp1", dp_shard=8, precision="bf16-mixed")
    assert step_spec(options).autocast == "bfloat16"
    (fsdp,) = strategies_of(options)
    assert (fsdp.param_dtype, fsdp.reduce_dtype, fsdp.buffer_dtype) == ("bfloat16",) * 3


def test_a_policy_that_was_given_stays():
    options = resolved(dp_shard=8, precision="bf16-mixed", reduce_dtype="fp32", fsdp_upcast="none")
    (fsdp,) = strategies_of(options)
    assert (fsdp.param_dtype, fsdp.reduce_dtype, fsdp.upcast) == ("bfloat16", "float32", "none")


def test_presets_bring_their_units():
    assert strategies(preset="hf-trainer", dp_shard=8)[0].wrap == ("accelerate",)
    assert resolved(preset="torchtune", dp_shard=8)["sync_each_batch"].value is True
    assert resolved(preset="torchtune")["sync_each_batch"].value is None
    assert resolved(preset="hf-trainer", dp_shard=8)["sync_each_batch"].value is None
    assert resolved(preset="hf-trainer")["wrap"].value is None


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dp_shard": 4, "tp": 2, "gpus": 16}, "dp_shard 4 x tp 2 = 8 ranks, but there are 16 GPUs"),
        ({"gpus": 8}, "1 = 1 ranks, but there are 8 GPUs"),
        ({"engine": "fsdp2", "zero_stage": 3}, "zero_stage 3 belongs to engine deepspeed, but the engine is fsdp2"),
        ({"engine": "ddp", "zero_stage": 1}, "zero_stage 1 belongs to engine deepspeed"),
        ({"cpu_offload": True}, "cpu_offload: shards and optimizer states on the host are not predicted yet"),
        ({"sync_each_batch": True}, "sync_each_batch belongs to engines that reduce"),
        ({"engine": "fsdp1", "dp_shard": 2, "output_dtype": "bf16"}, "output_dtype is FSDP2's"),
        ({"dp_shard": 2, "checkpoint_around_units": True}, "belongs to engine fsdp1, not to fsdp2"),
        ({"dp_shard": 2, "method": "lora", "kernels": "fused-lora"}, "adapters that no unit has gathered"),
        ({"engine": "fsdp1", "dp_shard": 2, "checkpoint_around_units": True}, "there are no checkpoints"),
        ({"zero_stage": 4}, "stages are 0, 1, 2 and 3"),
        ({"engine": "none", "dp_shard": 2}, "name the engine that spreads the data"),
        ({"dp_shard": 0}, "dp_shard is 0"),
        ({"dp_shard": -2}, "dp_shard is -2"),
        ({"tp": 2, "engine": "fsdp1", "dp_shard": 2}, "flat parameters hold no DTensors"),
        ({"reshard_after_forward": "sometimes", "dp_shard": 2}, "always, never or a number of ranks"),
        ({"reshard_after_forward": "2", "engine": "fsdp1", "dp_shard": 4}, "is FSDP2's"),
        ({"reduce_dtype": "fp32"}, "reduce_dtype belongs to engines fsdp1 and fsdp2, not to none"),
        ({"wrap": "blocks", "engine": "ddp", "dp_replicate": 2}, "wrap belongs to engines"),
        ({"pp": 2, "engine": "fsdp1", "dp_shard": 2}, "pp 2 with engine fsdp1 is not predicted"),
        ({"cp": 2, "dp_shard": 2}, "context parallelism is not predicted yet"),
        ({"ep": 2, "dp_shard": 2}, "expert parallelism is not predicted yet"),
        ({"engine": "megatron", "tp": 2}, "engine megatron is not predicted yet"),
    ],
)
def test_refused_with_the_rule(values, says):
    assert says in refusal(**values)


def test_an_unknown_engine_lists_the_known_ones():
    with pytest.raises(UnknownName, match="fsdp2"):
        strategies(engine="fsdp3")
