"""`metapeak checkpointing` as a user meets it."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from metapeak.strategies import apply_checkpoint_plan
from metapeak.tracer.capture import record_training_step
from tests.reports.command_line import metapeak

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
STEP = ("--batch-size", "16", "--seq-len", "256", "--optimizer", "sgd")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="module")
def study(folder):
    done = metapeak("checkpointing", ".", *STEP, "--checkpointing", "layers:1-2", "--verify", "--json", "-", cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_json_holds_the_contract(study):
    assert [row["policy"] for row in study["policies"]] == [
        "none",
        "full",
        "every:2",
        "every:4",
        "selective:torchtitan",
        "offload",
        "layers:1-2",
    ]
    peaks = {row["policy"]: row["peak"]["allocated_bytes"] for row in study["policies"]}
    saved = {row["policy"]: row["saved_bytes"] for row in study["policies"]}
    assert peaks["full"] < peaks["every:2"] < peaks["none"] and saved["full"] < saved["every:2"] < saved["none"]
    assert study["policies"][0]["recompute_flops"] == 0
    assert [row["layer"] for row in study["layers"]] == [f"model.layers.{number}" for number in range(4)]
    assert len({row["saved_bytes"] for row in study["layers"]}) == 1  # equal layers
    assert all(row["kept_bytes_if_checkpointed"] < row["saved_bytes"] for row in study["layers"])
    costs = [row["recompute_flops"] for row in study["frontier"]]
    assert costs == sorted(costs) and study["plan"] is None


def test_every_policy_is_verified_by_the_real_library(study):
    for row in study["policies"]:
        assert row["verified_peak_bytes"] == row["peak"]["requested_bytes"]


def test_recompute_is_a_third_of_the_blocks_step(study):
    """Forward costs a third of forward plus backward; under early stop a block skips its last product."""
    full = next(row for row in study["policies"] if row["policy"] == "full")
    assert 20 < full["extra_flops_percent"] < 33.4


def test_a_plan_fits_its_budget_and_applies_to_a_real_model(study, folder):
    none, full = study["policies"][0], study["policies"][1]
    budget = (none["peak"]["allocated_bytes"] + full["peak"]["allocated_bytes"]) // 2
    done = metapeak("checkpointing", ".", *STEP, "--budget", str(budget), "--plan", "plan.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Plan under" in done.stdout
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["peak_bytes"] <= budget and 0 < len(plan["checkpointed"]) < 4

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.config.use_cache = False
    apply_checkpoint_plan(model.train(), plan)
    ids = torch.arange(16 * 256).view(16, 256) % 128
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    graph, _ = record_training_step(model, batch, lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True))
    workspaces = 2 * 8_519_680
    assert int(graph.liveness().live_bytes(rounded=True).max()) + workspaces == plan["peak_bytes"]


def test_the_report_shows_tables_and_curves(folder):
    done = metapeak("checkpointing", ".", *STEP, cwd=folder)
    assert done.returncode == 0 and done.stderr == ""
    wanted = ["Policies", "Live bytes over the steady step", "Layers, each alone", "Pareto frontier", "Assumed"]
    positions = [done.stdout.index(words) for words in wanted]
    assert positions == sorted(positions)
    assert "model.layers.0 ... model.layers.3" in done.stdout
    assert "█" in done.stdout


def test_a_narrow_terminal_is_not_overrun(folder):
    done = metapeak("checkpointing", ".", *STEP, cwd=folder, COLUMNS="60")
    assert done.returncode == 0
    assert max(len(line) for line in done.stdout.splitlines()) <= 60
    assert "…" not in done.stdout  # nothing cut


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--checkpointing", "layers:7"], ["7", "out of range", "4 blocks"]),
        (["--checkpointing", "layers:3-1"], ["3-1", "backwards"]),
        (["--checkpointing", "sometimes"], ["sometimes", "every:N"]),
        (["--checkpointing", "modules:nothing.*"], ["nothing.*", "matches no module"]),
        (["--budget", "1MiB"], ["1,048,576", "least reachable peak", "held by"]),
        (["--budget", "some"], ["some"]),
        (["--plan", "x.json"], ["--budget"]),
    ],
)
def test_bad_input_gets_one_clear_message(folder, arguments, words):
    done = metapeak("checkpointing", ".", *STEP, *arguments, cwd=folder)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in done.stderr


def test_estimate_takes_every_policy(folder):
    peaks = {}
    for policy in ("none", "full", "layers:0-3", "every:2", "budget:0.16"):
        done = metapeak("estimate", ".", *STEP, "--checkpointing", policy, "--json", "-", cwd=folder)
        assert done.returncode == 0, done.stderr
        peaks[policy] = json.loads(done.stdout)["ranks"][0]["peak"]["requested_bytes"]
    assert peaks["full"] == peaks["layers:0-3"] < peaks["every:2"] < peaks["none"]
    assert peaks["full"] < peaks["budget:0.16"] <= 0.16 * 2**30 < peaks["none"]
