"""Several values of an option, and the largest that fits, as a user meets them."""

import csv
import io
import json

import pytest

from metapeak.reports.options import Several, values_of
from metapeak.strategies.settings import BY_NAME
from tests.reports.command_line import metapeak
from tests.reports.conftest import LLAMA


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 4096}))
    return str(path)


def record_of(*arguments, cwd=None):
    done = metapeak("estimate", *arguments, "--json", "-", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_point_is_what_an_estimate_of_it_says(llama):
    swept = {"seq_len": [32, 64], "checkpointing": ["none", "full"], "method": ["full", "lora"]}
    flags = ("--seq-len", "32,64", "--checkpointing", "none,full", "--method", "full,lora", "--gpu-memory", "1GiB")
    record = record_of(llama, *flags)
    assert {name: sorted(values) for name, values in record["swept"].items()} == {
        name: sorted(values) for name, values in swept.items()
    }
    assert len(record["points"]) == 8 and len({json.dumps(point["options"]) for point in record["points"]}) == 8
    assert record["traces"] == 6  # two lengths; one for both policies of full, two for LoRA
    for point in (record["points"][0], record["points"][3], record["points"][-1]):
        values = [
            item for name, value in point["options"].items() for item in (f"--{name.replace('_', '-')}", str(value))
        ]
        alone = record_of(llama, *values, "--gpu-memory", "1GiB")
        (rank,) = alone["ranks"]
        assert {name: rank["peak"][name] for name in point["peak"]} == point["peak"]
        assert point["breakdown"] == rank["breakdown"] and point["steady_bytes"] == rank["steady_bytes"]
        assert point["fit"]["verdict"] == alone["fit"]["verdict"]
        assert point["fit"]["headroom_bytes"] == alone["fit"]["headroom_bytes"]


def test_table_csv_and_heat_map(llama, tmp_path):
    step = (llama, "--seq-len", "16,32", "--batch-size", "1,2,3", "--gpu-memory", "1GiB")
    done = metapeak("estimate", *step, "--csv", "s.csv", "--heatmap", "h.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stderr and "6 estimates" in done.stdout and "fits" in done.stdout
    rows = list(csv.DictReader(io.StringIO((tmp_path / "s.csv").read_text())))
    assert [(row["batch_size"], row["seq_len"]) for row in rows] == [(b, s) for b in "123" for s in ("16", "32")]
    peaks = {(row["batch_size"], row["seq_len"]): int(row["requested_bytes"]) for row in rows}
    assert peaks["3", "32"] > peaks["1", "32"] > 0
    page = (tmp_path / "h.html").read_text()
    assert "heatmap" in page and "seq_len" in page and "batch_size" in page


def test_a_point_that_cannot_be_is_refused_and_the_others_stand(llama):
    record = record_of(llama, "--seq-len", "16", "--method", "full,lora", "--lora-rank", "4,8")
    refused = [point for point in record["points"] if point["refused"]]
    assert [point["options"]["method"] for point in refused] == ["full", "full"]
    assert "belongs to method lora" in refused[0]["refused"]
    done = metapeak("estimate", llama, "--seq-len", "16,32", "--lora-rank", "4")
    assert done.returncode == 1 and "belongs to method lora" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--csv", "x.csv"), "give an option several values"),
        (("--seq-len", "1,2", "--html", "x.html"), "one estimate"),
        (("--seq-len", "1,2", "--require-fit"), "one estimate"),
        (("--seq-len", "1,2", "--heatmap", "x.html"), "at least two options"),
        (("--seq-len", "1,2", "--largest", "batch_size"), "one estimate"),
        (("--largest", "batch_size"), "needs --gpu"),
        (("--largest", "optimizer", "--gpu", "t4"), "Unknown option to search"),
        (("--largest", "batch_size", "--batch-size", "2", "--gpu", "t4"), "Leave one out"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_traced(arguments, words, tmp_path):
    done = metapeak("estimate", "nobody/nothing", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "") and words in done.stderr


def test_parquet_needs_its_package(tmp_path):
    done = metapeak("estimate", "nobody/nothing", "--seq-len", "1,2", "--parquet", "x.parquet", cwd=tmp_path)
    assert done.returncode == 1 and ("pyarrow" in done.stderr or "nobody/nothing" in done.stderr)


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("seq_len", "2048,4096,2048", (2048, 4096)),
        ("seq_len", "2048", 2048),
        ("lora_alpha", "8,16.5", (8.0, 16.5)),
        ("gpu", "h100, RTX 4090", ("h100", "RTX 4090")),
        ("checkpointing", "none,full,every:2", ("none", "full", "every:2")),
        ("checkpointing", "layers:0-3,7", "layers:0-3,7"),
        ("checkpointing", "none;layers:0-3,7", ("none", "layers:0-3,7")),
        ("checkpointing", "selective:ops=mm,addmm", "selective:ops=mm,addmm"),
        ("lora_targets", "q_proj,v_proj", "q_proj,v_proj"),
        ("lora_targets", "q_proj,v_proj;all-linear", ("q_proj,v_proj", "all-linear")),
        ("optimizer_args", "lr=1,eps=2", "lr=1,eps=2"),
    ],
)
def test_how_values_are_told_apart(name, text, values):
    found = values_of(BY_NAME[name], text)
    assert found == (Several(values) if isinstance(values, tuple) else values)
    assert isinstance(found, Several) == isinstance(values, tuple)


def test_wrong_values_are_wrong_usage():
    assert metapeak("estimate", "x", "--seq-len", "1,two").returncode == 2


@pytest.mark.parametrize("option", ["batch_size", "seq_len"])
def test_the_largest_that_fits_and_the_next_does_not(llama, option):
    other = ("--seq-len", "64") if option == "batch_size" else ("--batch-size", "16")
    record = record_of(llama, *other, "--largest", option, "--gpu-memory", "800MiB")
    largest = record["largest"]
    value, flag = largest["value"], f"--{option.replace('_', '-')}"
    assert value > 1 and record["fit"]["verdict"] == "fits"
    assert record["options"][option]["value"] == value
    for asked, fits in ((value, True), (value + 1, False)):
        alone = record_of(llama, *other, flag, str(asked), "--gpu-memory", "800MiB")
        assert (alone["fit"]["verdict"] == "fits") is fits
    assert largest["next"]["value"] == value + 1 and largest["next"]["verdict"] != "fits"
    assert len(largest["tried"]) < 25


def test_the_largest_stops_where_the_model_does():
    done = metapeak("estimate", "openai-community/gpt2", "--largest", "seq_len", "--gpu", "h100")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Largest seq_len that fits h100-sxm: 1024 (1025 is refused")


def test_nothing_fits(llama):
    done = metapeak("estimate", llama, "--largest", "batch_size", "--gpu-memory", "300MiB", "--seq-len", "8")
    assert done.returncode == 0 and done.stdout.startswith("No batch_size fits 300MiB: with 1 it needs")
