"""`metapeak validate`: groups that share a trace, results that are kept, an interruption, the record and the page."""

import json

import pytest

from metapeak.reports import validation_run
from metapeak.reports.cli import main
from metapeak.reports.receipt_options import options_of_receipt, reference_of
from metapeak.reports.receipts import Refused, read_receipts
from metapeak.reports.validation import Prediction, predict
from metapeak.reports.validation_report import render_validation_html, summary_of, validation_record
from metapeak.reports.validation_run import NOT_RUN, trace_groups, validate
from metapeak.tracer.disk_cache import DiskCache

TINY = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"


def line(name, **changes):
    options = {"batch_size": 2, "seq_len": 32, "weights_dtype": "fp32"} | changes.pop("options", {})
    fields = {"id": name, "model": TINY, "options": options, "metric": "max_allocated", "measured_bytes": 10**8}
    return {**fields, "source": "owner/project table.md", "mechanism": ["activations"], **changes}


@pytest.fixture
def receipts(tmp_path):
    lines = [
        line("plain"),
        line("plain-reserved", metric="max_reserved", rounding_bytes=10**6),
        line("checkpointed", options={"checkpointing": "full"}),
        line("other", options={"seq_len": 64}),
        line("compiled", options={"compile": True}),
        line("unstated", metric="unknown-gpu"),
        line("shared", options={"parallel": {"engine": "megatron"}}),
    ]
    path = tmp_path / "receipts.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path, read_receipts(str(path))


def test_receipts_that_differ_in_liveness_strategies_share_a_trace(receipts):
    groups = [[[one.id for one in step] for step in group] for group in trace_groups(receipts[1])]
    assert groups[0] == [["plain", "plain-reserved", "compiled", "unstated"], ["checkpointed"]]
    assert [["other"]] in groups and [["shared"]] in groups


def test_a_shared_trace_gives_what_each_gives_alone(receipts):
    together = {one.receipt.id: one.predicted_bytes for one in validate(receipts[1]).predictions}
    for name in ("plain", "checkpointed"):
        (alone,) = predict([one for one in receipts[1] if one.id == name])
        assert together[name] == alone.predicted_bytes
    assert together["checkpointed"] < together["plain"]


def test_refusals_and_stand_ins(receipts):
    found = {one.receipt.id: one for one in validate(receipts[1]).predictions}
    assert "megatron" in found["shared"].refused and "does not say" in found["unstated"].refused
    assert found["compiled"].predicted_bytes == found["plain"].predicted_bytes
    assert found["compiled"].within is None and "eager" in found["compiled"].receipt.stand_in
    summary = summary_of(list(found.values()))
    assert summary["count"] == 4 and summary["refused"] == 2 and summary["beside_stand_in"]["count"] == 1


def test_results_are_kept_and_an_interrupted_run_goes_on(receipts, tmp_path, monkeypatch):
    cache = DiskCache(tmp_path / "cache")
    whole, calls = validation_run._predict_group, []

    def stops_at_the_second(group):
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(group)
        return whole(group)

    monkeypatch.setattr(validation_run, "_predict_group", stops_at_the_second)
    first = validate(receipts[1], cache=cache)
    assert first.interrupted and first.predictions[0].predicted_bytes and first.predictions[3].refused == NOT_RUN
    monkeypatch.setattr(validation_run, "_predict_group", whole)
    second = validate(receipts[1], cache=cache)
    assert not second.interrupted and second.from_cache == 5
    assert second.predictions[0] == first.predictions[0] and second.predictions[3].predicted_bytes

    def never(group):
        raise AssertionError("all of it is kept")

    monkeypatch.setattr(validation_run, "_predict_group", never)
    assert validate(receipts[1], cache=cache).predictions == second.predictions


def test_several_processes_give_the_same(receipts):
    some = receipts[1][:4]
    assert validate(some, jobs=2).predictions[3].predicted_bytes == validate(some).predictions[3].predicted_bytes


def test_the_command_writes_record_and_page(receipts, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("METAPEAK_CACHE", str(tmp_path / "cache"))
    page, record = tmp_path / "page.html", tmp_path / "record.json"
    arguments = ["validate", str(receipts[0]), "--jobs", "1", "--only", "plain,shared"]
    assert main([*arguments, "--html", str(page), "--json", str(record)]) == 0
    rows = json.loads(record.read_text())["receipts"]
    assert [row["id"] for row in rows] == ["plain", "plain-reserved", "shared"]
    assert rows[0]["source"] == "owner/project" and rows[2]["refused"]
    text = page.read_text()
    assert "plain-reserved" in text and "<script" not in text and "http" not in text
    capsys.readouterr()
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "owner/project" in printed and "the byte" in printed and "Refused, 1" in printed


def test_an_empty_summary_renders(receipts):
    refused = [Prediction(receipt=one, refused="no") for one in receipts[1]]
    assert validation_record(refused)["summary"]["median_abs_error_percent"] is None
    assert "Refused" in render_validation_html(refused, interrupted=True)
    assert issubclass(Refused, Exception)


def test_torchtitans_parallel_runs_are_its_twins(tmp_path):
    degrees = {"engine": "fsdp2", "dp_shard": 8, "tp": 8, "pp": 4, "sequence_parallel": True}
    titan = {"definition": "package:torchtitan", "definition_key": "llama3:8B", "twin": TINY}
    options = {"batch_size": 12, "float8": "tensorwise", "loss": "eager"}
    lines = [
        line("loops", options=options | {"parallel": degrees | {"schedule": "interleaved-1f1b"}}, **titan),
        line("no-twin", options=options | {"parallel": {"engine": "fsdp2", "dp_shard": 8}}, **titan),
        line("both", options=options | {"parallel": degrees | {"schedule": "1f1b", "cp": 2}}, **titan),
    ]
    path = tmp_path / "titan.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    loops, no_twin, both = read_receipts(str(path))
    found = options_of_receipt(loops)
    assert (found["schedule"], found["microbatches"], found["batch_size"]) == ("interleaved-1f1b:2", 4, 3)
    assert found["sequence_parallel"] and found["loss_parallel"] and "loss" not in found
    assert reference_of(loops) == TINY and "in place of torchtitan's and products in bfloat16" in loops.stand_in
    assert (
        reference_of(no_twin) == "torchtitan:llama3:8B"
        and no_twin.stand_in == "products in bfloat16 in place of float8"
    )
    with pytest.raises(Refused, match="pp 4 and cp 2 together"):
        options_of_receipt(both)
