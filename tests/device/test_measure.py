"""The measuring program on the CPU: the same path and record as on a GPU."""

import json

import pytest

from metapeak.reports.receipt_options import options_of_receipt
from metapeak.reports.receipts import read_receipts
from metapeak.strategies.settings import options_of, resolve
from tests.device import measure, run_case

TINY = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"


@pytest.mark.parametrize("one", measure.matrix(), ids=measure.slug)
def test_every_case_is_one_that_a_prediction_understands(one, tmp_path):
    receipts = list(measure.receipts_of(one, {"bytes": {"max_allocated": 1}, "versions": {"torch": "2.13.0"}}, 1))
    path = tmp_path / "receipts.jsonl"
    path.write_text("".join(json.dumps(receipt) + "\n" for receipt in receipts))
    (receipt,) = read_receipts(str(path))
    options = resolve(options_of(options_of_receipt(receipt), "receipt"))
    assert options["method"].value == one["options"]["method"]
    assert options["batch_size"].value == one["options"]["batch_size"]


def test_names_tell_the_cases_apart():
    names = [measure.slug(one) for one in measure.matrix()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {**measure.MIXED, "checkpointing": "full", "grad_accum": 2, "grad_clip": 1.0},
        {**measure.LORA, "checkpointing": "full"},
        {**measure.LORA, "method": "qlora", **measure.NF4},
    ],
    ids=["plain", "mixed", "lora", "qlora"],
)
def test_a_case_runs_on_the_cpu(more):
    one = measure.case(TINY, 2, 16, **more)
    result = run_case.measured_on_cpu({**one, "snapshot": None})
    assert result["task"] == "causal-lm" and result["bytes"]["rss"] > 0


def test_what_fails_and_what_the_time_does_not_reach_is_said(tmp_path, capsys):
    wrong = measure.case("nobody/nothing", 1, 16)
    out = tmp_path / "out.jsonl"
    assert measure.main(["--device", "cpu", "--minutes", "0", "--out", str(out)]) == 0
    assert "2 cases not run" in capsys.readouterr().err and out.read_text() == ""
    (line,) = measure.receipts_of(wrong, {"failed": "nobody/nothing was not found"}, 3)
    assert line["failed"] and "measured_bytes" not in line
    assert measure.main(["--device", "cpu", "--only", "no such case", "--out", str(out)]) == 1
