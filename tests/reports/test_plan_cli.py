"""`metapeak plan` as a user meets it."""

import json

import pytest

from tests.reports.command_line import metapeak
from tests.strategies.parallel.test_sharded_steps import CONFIG


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_table_and_record_agree(model):
    command = ["plan", model, "--gpu", "l4,t4", "--gpus", "1,2", "--seq-len", "16", "--tokens-per-batch", "64"]
    command += ["--top", "2", "--no-cache", "--batch-size", "2"]
    shown = metapeak(*command)
    assert shown.returncode == 0, shown.stderr
    assert "metapeak estimate" in shown.stdout and "not offers" in shown.stdout
    record = json.loads(metapeak(*command, "--json", "-").stdout)
    assert len(record["plans"]) == 2 and record["candidates"] >= record["simulated"] >= 2
    first = record["plans"][0]
    assert first["micro_batch"] == 2 and first["verdict"] == "fits"
    assert f"{first['gpus']} x {first['gpu']}" in shown.stdout
    assert first["offers"][0]["usd_per_million_tokens"][0] > 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--gpu", "h1000"], "h1000"),
        (["--gpu", "l4", "--gpus", "4..2"], "the range ends before it begins"),
        (["--gpu", "l4", "--tokens-per-batch", "0"], "at least 1"),
        (["--gpu", "l4", "--headroom", "100"], "percentage below 100"),
        (["--gpu", "l4", "--methods", "fine"], "fine"),
        (["--gpu", "l4", "--instances", "absent.csv"], "Cannot read instances from absent.csv"),
    ],
)
def test_bad_input_gets_one_line(model, flags, says):
    run = metapeak("plan", model, *flags)
    assert run.returncode == 1 and says in run.stderr and run.stderr.count("\n") == 1
