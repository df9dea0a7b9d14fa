"""`--verify`: the two ways to FSDP2's bytes agree through the options, and a difference would be seen."""

import json
from dataclasses import replace

import pytest

from metapeak.strategies.parallel.verify import verified
from metapeak.strategies.request import simulate_resolved
from metapeak.strategies.settings import options_of, resolve
from metapeak.tracer.errors import InputError
from tests.strategies.parallel.test_sharded_steps import CONFIG


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("verified") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def both(model, **values):
    options = resolve(options_of({"seq_len": 16, "batch_size": 2, **values}, "call"))
    simulation = simulate_resolved(model, options)
    return simulation, options


@pytest.mark.parametrize(
    "values",
    [
        {"dp_shard": 3},
        {"dp_shard": 8, "precision": "bf16-mixed", "checkpointing": "full"},
        {"dp_shard": 2, "reshard_after_forward": "never", "checkpointing": "selective:ops=mm"},
    ],
)
def test_both_ways_agree(model, values):
    simulation, options = both(model, **values)
    records = verified(model, simulation, options)
    assert [record["rank"] for record in records] == [rank.rank for rank in simulation.ranks]
    assert all(record["equal"] and len(record["phases"]) == 7 for record in records)


def test_a_difference_is_seen(model):
    simulation, options = both(model, dp_shard=4)
    rank = simulation.ranks[0]
    wrong = rank.liveness.nbytes.copy()
    wrong[0] += 4
    changed = replace(rank, liveness=replace(rank.liveness, nbytes=wrong))
    assert not verified(model, replace(simulation, ranks=(changed,)), options)[0]["equal"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "needs --dp-shard with engine fsdp2"),
        ({"engine": "fsdp1", "dp_shard": 2}, "needs --dp-shard with engine fsdp2"),
        ({"dp_shard": 2, "dp_replicate": 2}, "knows shards alone"),
        ({"dp_shard": 2, "wrap": "none"}, "units are the blocks"),
        ({"dp_shard": 2, "cpu_offload": True}, "shards on the host"),
        ({"dp_shard": 2, "evaluate": True}, "compares training steps"),
        ({"dp_shard": 2, "grad_accum": 2}, "accumulation is not rewritten"),
    ],
)
def test_refused(model, values, says):
    simulation, options = both(model, **values)
    with pytest.raises(InputError, match=says):
        verified(model, simulation, options)
