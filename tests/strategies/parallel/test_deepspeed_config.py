"""DeepSpeed's own JSON as options."""

import json

import pytest

from metapeak.reports.cli import main
from metapeak.strategies.parallel.zero.config_file import options_of_config
from metapeak.tracer.errors import InputError

ZERO_2 = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "fp16": {"enabled": True, "loss_scale": 0},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-5}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": 2e8,
        "allgather_partitions": True,
    },
}


def test_keys_become_options():
    assert options_of_config(ZERO_2, "ds.json") == {
        "engine": "deepspeed",
        "zero_stage": 2,
        "offload_optimizer": "cpu",
        "overlap_comm": True,
        "reduce_bucket_size": 2e8,
        "batch_size": 2,
        "grad_accum": 4,
        "max_grad_norm": 0.5,
        "param_dtype": "fp16",
        "optimizer": "adam",
    }


def test_what_the_trainer_fills_in_is_left_to_the_command_line_or_goes_by_its_rule():
    auto = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 1e9},
    }
    assert options_of_config(auto, "ds.json") == {
        "engine": "deepspeed",
        "zero_stage": 3,
        "reduce_bucket_size": "auto",
        "sub_group_size": 1e9,
    }


def test_names_with_and_without_their_stage_are_one():
    short = {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 5}}
    assert options_of_config(short, "ds.json")["stage3_prefetch_bucket_size"] == 5


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"activation_checkpointing": {}}, "ds.json: activation_checkpointing: not known"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_hpz_partition_size is not predicted"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param to nvme"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer OneBitAdam of DeepSpeed is not predicted"),
    ],
)
def test_what_is_not_known_is_refused(changed, says):
    with pytest.raises(InputError, match=says):
        options_of_config(ZERO_2 | changed, "ds.json")


def test_a_file_of_deepspeeds_is_one_option(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO_2 | {"zero_optimization": {"stage": 3, "leaf_module": {}}}))
    assert main(["estimate", "gpt2", "--config", str(path)]) != 0
    assert "zero_optimization.leaf_module is not predicted" in capsys.readouterr().err
