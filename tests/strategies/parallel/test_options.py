"""The options of `parallel`: which engine they stand for, what it makes of a precision, and what is refused."""

import pytest

from metapeak.strategies.parallel.context_parallel import ContextParallel
from metapeak.strategies.parallel.ddp import DDP
from metapeak.strategies.parallel.expert_parallel import ExpertParallel
from metapeak.strategies.parallel.fsdp1 import FSDP1
from metapeak.strategies.parallel.fsdp2 import FSDP2
from metapeak.strategies.parallel.layout import Layout
from metapeak.strategies.parallel.megatron import Megatron
from metapeak.strategies.parallel.pipeline import PipelineParallel
from metapeak.strategies.parallel.tensor_parallel import TensorParallel
from metapeak.strategies.parallel.zero import options as zero_options
from metapeak.strategies.parallel.zero.strategy import DeepSpeed
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
        ({"zero_stage": 3, "dp_shard": 8}, [DeepSpeed]),
        ({"zero_stage": 1, "dp_replicate": 8}, [DeepSpeed]),
        ({"engine": "deepspeed", "gpus": 8}, [DeepSpeed]),
        ({"engine": "megatron", "gpus": 8}, [Megatron]),
        ({"cp": 2}, [ContextParallel, FSDP2]),
        ({"tp": 2, "cp": 2, "ep": 4, "dp_shard": 2}, [TensorParallel, ExpertParallel, ContextParallel, FSDP2]),
        (
            {"pp": 2, "tp": 2, "cp": 2, "ep": 4, "dp_shard": 2, "sequence_parallel": True},
            [PipelineParallel, TensorParallel, ExpertParallel, ContextParallel, FSDP2],
        ),
        ({"tp": 2, "ep": 2}, [TensorParallel, ExpertParallel]),
    ],
)
def test_the_engine_that_options_stand_for(values, kinds):
    assert [type(strategy) for strategy in strategies(**values)] == kinds


def test_a_nested_mapping_is_the_same():
    nested = strategies(parallel={"engine": "fsdp2", "dp_shard": 4, "dp_replicate": 2, "tp": 1, "pp": 1})
    assert nested == strategies(dp_shard=4, dp_replicate=2, engine="fsdp2")


def test_ddp_has_replicas_whatever_their_axis_is_called():
    assert strategies(engine="ddp", dp_shard=4)[0].layout == Layout(dp_replicate=4)


@pytest.fixture(autouse=True)
def deepspeed_is_there(monkeypatch):
    monkeypatch.setattr(zero_options, "is_installed", lambda: True)


def test_a_stage_without_a_degree_takes_all_gpus():
    assert strategies(zero_stage=3, gpus=8)[0].layout == Layout(dp_shard=8)
    assert strategies(zero_stage=3)[0].layout == Layout()
    assert strategies(zero_stage=1, dp_replicate=4)[0].layout == Layout(dp_shard=4)


def test_deepspeed_casts_parameters_where_a_region_would_cast_operators():
    options = resolved(zero_stage=2, dp_shard=8, precision="bf16-mixed", grad_accum_dtype="fp32", max_grad_norm=1.0)
    assert (step_spec(options).autocast, step_spec(options).grad_accum_dtype) == (None, None)
    (zero,) = strategies_of(options)
    assert (zero.param_dtype, zero.grad_accum_dtype, zero.max_grad_norm) == ("bfloat16", "float32", 1.0)


def test_numbers_of_elements_are_those_of_deepspeeds_files():
    (zero,) = strategies(zero_stage=3, gpus=2, reduce_bucket_size="2e8", overlap_comm=False, sub_group_size=1e9)
    assert dict(zero.zero) == {"reduce_bucket_size": 200_000_000, "overlap_comm": False, "sub_group_size": 10**9}


def test_the_trainers_sizes_go_by_the_hidden_size():
    (zero,) = strategies(preset="hf-trainer", zero_stage=3, gpus=2)
    assert {name for name, value in zero.zero if value == "auto"} == {
        "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"
    }  # fmt: skip
    assert not zero.fused_adam and strategies(zero_stage=3, gpus=2)[0].fused_adam


def test_without_deepspeed_the_engine_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(zero_options, "is_installed", lambda: False)
    assert "pip install 'deepspeed>=0.19.8,<0.20'" in refusal(zero_stage=3, gpus=8)


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
        ({"cpu_offload": True}, "cpu_offload with engine none is not predicted"),
        (
            {"cpu_offload": True, "dp_shard": 2, "grad_accum": 2, "sync_each_batch": True},
            "gradients that are added on the host",
        ),
        ({"cpu_offload": True, "dp_shard": 2, "implementation": "in-backward"}, "with an optimizer in backward"),
        ({"sync_each_batch": True}, "sync_each_batch belongs to engines that reduce"),
        (
            {"dp_shard": 2, "gradient_as_bucket_view": True},
            "gradient_as_bucket_view belongs to engine ddp, not to fsdp2",
        ),
        ({"dp_replicate": 2, "bucket_cap_mb": 0}, "a bucket has a MiB at least"),
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
        ({"pp": 2, "zero_stage": 3}, "pp 2 with engine deepspeed is not predicted"),
        ({"engine": "megatron", "tp": 2}, "engine megatron with tp 2 is not predicted"),
        ({"engine": "megatron", "gpus": 2, "zero_stage": 1}, "belongs to engine deepspeed, but the engine is megatron"),
        ({"engine": "megatron", "gpus": 2, "output_dtype": "bf16"}, "not to megatron"),
        ({"zero_stage": 3, "tp": 2}, "engine deepspeed with tp 2 is not predicted"),
        ({"zero_stage": 3, "dp_shard": 2, "dp_replicate": 4}, "is one degree: give dp_shard 8"),
        ({"dp_shard": 2, "reduce_bucket_size": "5e8"}, "belongs to engine deepspeed, not to fsdp2"),
        ({"zero_stage": 2, "stage3_max_live_parameters": 1}, "belongs to zero_stage 3, not to 2"),
        ({"zero_stage": 2, "offload_param": "cpu"}, "stage 2 has no partitions of the parameters"),
        ({"zero_stage": 3, "sub_group_size": "auto"}, "has no rule for it"),
        ({"zero_stage": 3, "sub_group_size": "many"}, "no number of elements"),
        ({"zero_stage": 3, "master_weights": True}, "float32 copies of the weights already"),
        ({"zero_stage": 3, "reshard_after_forward": "never"}, "belongs to engines fsdp1 and fsdp2, not to deepspeed"),
        ({"tp": 2, "dp_replicate": 2}, "engine ddp with tp: DistributedDataParallel takes no DTensors"),
        ({"ep": 2, "dp_replicate": 2}, "engine ddp with ep 2"),
        ({"cp": 2, "engine": "fsdp1"}, "engine fsdp1 with cp 2"),
        ({"cp": 2, "loss": "chunked:4"}, "cp with loss chunked:4"),
        ({"tp": 2, "sequence_parallel": True, "kernels": "fused-rmsnorm"}, "sequence_parallel with kernels"),
        ({"tp_plan": "lm_head=replicate"}, "tp_plan belongs to tp"),
    ],
)
def test_refused_with_the_rule(values, says):
    assert says in refusal(**values)


def test_an_unknown_engine_lists_the_known_ones():
    with pytest.raises(UnknownName, match="fsdp2"):
        strategies(engine="fsdp3")
