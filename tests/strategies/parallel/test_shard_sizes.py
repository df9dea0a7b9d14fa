"""A rank whose shards are smaller, told from the step of rank 0, equals its own trace, storage by storage."""

import json

import pytest

from metapeak.strategies import compose, simulate_options
from tests.strategies.parallel.test_sharded_steps import CONFIG


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "config.json"
    path.write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    return str(path)


@pytest.mark.parametrize(
    ("told", "options"),
    [
        (True, {"dp_shard": 5}),
        (True, {"dp_shard": 64, "precision": "bf16-mixed", "checkpointing": "full"}),
        (True, {"dp_shard": 3, "dp_replicate": 2, "optimizer": "adamw", "implementation": "fused"}),
        (True, {"dp_shard": 7, "method": "lora"}),
        (False, {"dp_shard": 5, "max_grad_norm": 1.0}),
        (False, {"dp_shard": 5, "implementation": "in-backward"}),
    ],
)
def test_told_and_traced_are_equal(model, monkeypatch, told, options):
    options = {"seq_len": 8, **options}
    original, answers = compose.graph_of_rank, []

    def noted(*arguments):
        answers.append(original(*arguments))
        return answers[-1]

    monkeypatch.setattr(compose, "graph_of_rank", noted)
    one = simulate_options(model, options)
    assert len(one.ranks) > 1 and len(answers) == len(one.ranks) - 1
    assert {graph is not None for graph in answers} == {told}
    monkeypatch.setattr(compose, "graph_of_rank", lambda *arguments: None)
    other = simulate_options(model, options)
    for mine, theirs in zip(one.ranks, other.ranks, strict=True):
        for column in ("birth", "death", "nbytes", "category", "op", "op_phase"):
            assert (getattr(mine.liveness, column) == getattr(theirs.liveness, column)).all(), (mine.rank, column)
        assert mine.device_bytes == theirs.device_bytes
