"""The options of `method` on the command line and in --config."""

import argparse
import json

import pytest

from metapeak.reports.options import add_to_parser, resolve_options
from metapeak.strategies import CheckpointEveryBlock, FrozenBase, LoRA
from metapeak.strategies.request import model_strategies, strategies_of
from metapeak.tracer.errors import InputError, UnknownName


def options(*arguments):
    parser = argparse.ArgumentParser()
    add_to_parser(parser)
    return resolve_options(parser.parse_args(arguments))


def test_flags_make_the_strategy():
    given = options(
        "--method", "lora", "--lora-rank", "8", "--lora-targets", "q_proj,v_proj", "--lora-dora",
        "--lora-layers", "0-2,5",
        "--lora-modules-to-save", "lm_head", "--adapter-dtype", "bf16", "--checkpointing", "full",
    )  # fmt: skip
    expected = LoRA(
        rank=8, targets=("q_proj", "v_proj"), dora=True, layers=(0, 1, 2, 5), modules_to_save=("lm_head",),
        adapter_dtype="bf16",
    )  # fmt: skip
    assert strategies_of(given) == [expected, CheckpointEveryBlock()]
    assert strategies_of(options()) == []
    frozen = options("--method", "frozen-base", "--trainable", "lm_head,*norm*")
    assert model_strategies(frozen) == [FrozenBase(trainable=("lm_head", "*norm*"))]


@pytest.mark.parametrize(
    "text",
    [
        "method: lora\nlora:\n  rank: 8\n  targets: [q_proj, k_proj]\n  dropout: 0\n  adapter_dtype: bf16\n",
        "method: lora\nlora_rank: 8\nlora_targets: q_proj,k_proj\nlora_dropout: 0.0\nadapter_dtype: bf16\n",
        json.dumps({"method": "lora", "lora": {"rank": 8, "targets": "q_proj,k_proj", "adapter-dtype": "bf16"}}),
    ],
    ids=["nested", "flat", "JSON"],
)
def test_config_files(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    given = options("--config", str(path))
    assert model_strategies(given) == [LoRA(rank=8, targets=("q_proj", "k_proj"), adapter_dtype="bf16", dropout=0.0)]
    assert given["lora_rank"].origin.startswith(str(path))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--lora-rank", "8"), "lora_rank belongs to method lora, but the method is full"),
        (("--method", "lora", "--trainable", "x"), "trainable belongs to method frozen-base"),
        (("--method", "frozen-base"), "needs `trainable`"),
        (("--method", "lora", "--lora-layers", "x"), "no list of numbers"),
    ],
)
def test_what_does_not_go_together(arguments, message):
    with pytest.raises(InputError, match=message):
        model_strategies(options(*arguments))


def test_unknown_names(tmp_path):
    with pytest.raises(UnknownName, match="method"):
        options("--method", "loro")
    (tmp_path / "job.yaml").write_text("lora: {rnk: 3}\n")
    with pytest.raises(UnknownName, match="lora_rank"):
        options("--config", str(tmp_path / "job.yaml"))
