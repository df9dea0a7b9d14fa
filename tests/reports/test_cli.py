"""The command line as a user meets it."""

import json

import pytest

from tests.reports.command_line import in_a_process, metapeak


@pytest.fixture(scope="module")
def qwen3():
    done = in_a_process("estimate", "Qwen/Qwen3-8B", "--gpu", "rtx-4090", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_json_holds_the_contract(qwen3):
    assert qwen3["schema_version"] == 1
    assert qwen3["model"]["parameters"] == qwen3["model"]["trainable_parameters"] == 8_190_735_360
    assert qwen3["model"]["parameter_bytes"] == 2 * 8_190_735_360
    assert qwen3["model"]["architecture"] == "Qwen3ForCausalLM"
    assert qwen3["how"]["traced"] is True
    (rank,) = qwen3["ranks"]
    peak = rank["peak"]
    assert peak["requested_bytes"] <= peak["allocated_bytes"] <= peak["reserved_bytes"]
    assert peak["reserved_bytes"] % (2 << 20) == 0
    assert sum(rank["breakdown"].values()) == rank["peak"]["requested_bytes"]
    assert set(rank["breakdown"]) == {
        "parameters",
        "gradients",
        "optimizer_states",
        "activations",
        "temporaries",
        "buffers",
        "inputs",
        "communication",
        "workspace",
    }
    assert [(phase["iteration"], phase["phase"]) for phase in rank["phases"]] == [
        (0, "load"),
        *[(iteration, phase) for iteration in (1, 2) for phase in ("forward", "backward", "optimizer")],
    ]
    assert qwen3["fit"]["verdict"] == "does-not-fit"
    assert qwen3["fit"]["headroom_bytes"] == qwen3["fit"]["capacity_bytes"] - rank["peak"]["device_bytes"] < 0
    assert qwen3["fit"]["device_range"] == rank["peak"]["device_range"]
    assert set(rank["overheads"]) == {"cuda_context", "libraries"}
    for overhead in rank["overheads"].values():
        assert 0 <= overhead["low"] < overhead["high"] and overhead["tag"] == "assumed" and overhead["source"]


def test_the_optimizer_step_is_the_peak_of_an_8b_model(qwen3):
    """foreach AdamW at batch 1: parameters, gradients, two states and one copy, 5 x 2 bytes a parameter."""
    (rank,) = qwen3["ranks"]
    assert rank["peak_at"]["phase"] == "optimizer"
    for name in ("parameters", "gradients", "temporaries"):
        assert rank["breakdown"][name] == pytest.approx(2 * 8_190_735_360, rel=1e-6)
    assert rank["breakdown"]["optimizer_states"] == 4 * 8_190_735_360


def test_options_say_where_they_are_from(qwen3):
    assert qwen3["options"]["gpu"] == {"value": "rtx-4090", "from": "command line"}
    assert qwen3["options"]["batch_size"] == {"value": 1, "from": "default"}
    assert qwen3["options"]["seq_len"]["value"] == 2048
    assert qwen3["options"]["weights_dtype"]["value"] == "bfloat16"
    assert "config" in qwen3["options"]["weights_dtype"]["from"]


def test_a_config_file_gives_the_same_names(tmp_path):
    (tmp_path / "job.yaml").write_text("# a job\nbatch_size: 2\nseq_len: 32\ncheckpointing: full\n")
    done = metapeak(
        "estimate", "openai-community/gpt2", "--config", "job.yaml", "--seq-len", "16", "--json", "-", cwd=tmp_path
    )
    options = json.loads(done.stdout)["options"]
    assert options["batch_size"] == {"value": 2, "from": "job.yaml:2"}
    assert options["checkpointing"] == {"value": "full", "from": "job.yaml:4"}
    assert options["seq_len"] == {"value": 16, "from": "command line"}


def test_the_report_says_what_the_contract_wants_in_its_order():
    done = metapeak("estimate", "openai-community/gpt2", "--seq-len", "64", "--gpu", "t4")
    assert done.returncode == 0 and done.stderr == ""
    wanted = [
        "openai-community/gpt2",
        "Fits t4",
        "Peak at iteration",
        "gradients",
        "without fragmentation) -> device",
        "(traced, derived, derived, assumed: CUDA context",
        "Phases",
        "Between steps",
        "Largest alive at the peak",
        "By module",
        "Dtypes",
    ]
    positions = [done.stdout.index(words) for words in wanted]
    assert positions == sorted(positions)
    assert max(len(line) for line in done.stdout.splitlines()) <= 140


def test_a_narrow_terminal_is_not_overrun():
    done = metapeak("estimate", "openai-community/gpt2", "--seq-len", "64", COLUMNS="50")
    assert max(len(line) for line in done.stdout.splitlines()) <= 50
    assert "…" not in done.stdout  # nothing cut


def test_require_fit_has_exit_codes():
    step = ("estimate", "openai-community/gpt2", "--seq-len", "64", "--require-fit")
    assert metapeak(*step, "--gpu", "t4").returncode == 0
    assert metapeak(*step, "--gpu-memory", "1GiB").returncode == 3
    # GPT-2 small with fp32 AdamW needs 5 x 4 bytes x 124.4 M parameters = 2.32 GiB: 2.8 GiB hold a
    # small context (0.24 GiB) and no libraries
    assert metapeak(*step, "--gpu-memory", "2.8GiB").returncode == 4


def test_a_file_is_written_whole_and_not_twice(tmp_path):
    step = ("estimate", "openai-community/gpt2", "--seq-len", "16", "--json", "out.json")
    first = metapeak(*step, cwd=tmp_path)
    assert first.returncode == 0 and first.stdout == "" and "wrote out.json" in first.stderr
    before = (tmp_path / "out.json").read_text()
    assert json.loads(before)["schema_version"] == 1
    second = metapeak(*step, cwd=tmp_path)
    assert second.returncode == 1 and "--force" in second.stderr
    assert (tmp_path / "out.json").read_text() == before
    assert metapeak(*step, "--force", cwd=tmp_path).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


BAD_INPUT = {
    "unknown id offline": (["nobody/nothing"], ["nobody/nothing", "not found", "HF_HUB_OFFLINE"]),
    "folder without config.json": (["./empty"], ["empty", "config.json"]),
    "unknown model_type": (["unknown.json"], ["nonsense", "model_type"]),
    "sizes that contradict": (["contradicts.json"], ["hidden_size", "30", "num_attention_heads", "4"]),
    "remote code": (["remote.json"], ["--trust-remote-code"]),
    "negative batch": (["openai-community/gpt2", "--batch-size", "-1"], ["batch_size", "-1"]),
    "absurd batch": (["openai-community/gpt2", "--batch-size", "10000000000"], ["batch_size"]),
    "no sequence": (["openai-community/gpt2", "--seq-len", "0"], ["seq_len"]),
    "absurd sequence": (["openai-community/gpt2", "--seq-len", "100000000"], ["seq_len"]),
    "past the positions": (["openai-community/gpt2", "--seq-len", "2048"], ["2048", "1024"]),
    "unknown GPU": (["openai-community/gpt2", "--gpu", "rtx-4900"], ["rtx-4900", "rtx-4090"]),
    "unwritable output": (["openai-community/gpt2", "--json", "missing/out.json"], ["missing", "does not exist"]),
    "unknown allocator setting": (
        ["openai-community/gpt2", "--allocator-config", "expandable_segment:True"],
        ["expandable_segment", "expandable_segments"],
    ),
    "allocator setting out of range": (
        ["openai-community/gpt2", "--allocator-config", "max_split_size_mb:5"],
        ["max_split_size_mb", "5", "20"],
    ),
    "unknown policy": (["openai-community/gpt2", "--checkpointing", "half"], ["half", "full"]),
    "no such config file": (["openai-community/gpt2", "--config", "no.yaml"], ["no.yaml"]),
    "unknown option in a file": (["openai-community/gpt2", "--config", "odd.yaml"], ["batchsize", "batch_size"]),
    "fp32 with flash attention 2": (["openai-community/gpt2", "--attention", "flash2"], ["flash2", "float32", "bf16"]),
    "no loss": (["mine.py:no_loss"], ["loss"]),
    "no such function": (["mine.py:missing"], ["missing"]),
}


@pytest.mark.parametrize("arguments, words", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_gets_one_clear_message(arguments, words, tmp_path):
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 99}
    (tmp_path / "empty").mkdir()
    (tmp_path / "unknown.json").write_text('{"model_type": "nonsense"}')
    (tmp_path / "contradicts.json").write_text(json.dumps({**llama, "hidden_size": 30, "num_attention_heads": 4}))
    remote = {"model_type": "own", "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}}
    (tmp_path / "remote.json").write_text(json.dumps(remote))
    (tmp_path / "odd.yaml").write_text("batchsize: 3\n")
    (tmp_path / "mine.py").write_text(
        "import torch\ndef no_loss():\n    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)\n"
    )
    before = sorted(tmp_path.rglob("*"))
    offline = "HF_HUB_OFFLINE" in words  # huggingface_hub reads it when it is imported
    done = (in_a_process if offline else metapeak)("estimate", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_step_that_cannot_be_traced_names_op_module_and_reason(tmp_path):
    (tmp_path / "mine.py").write_text(
        """
import torch

class Gate(torch.nn.Module):
    def forward(self, x):
        return x[x > 0].sum()  # how many are positive, only a run knows

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), Gate()), (torch.ones(2, 4),)
"""
    )
    done = metapeak("estimate", "mine.py:model", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert "aten." in done.stderr and "module '1'" in done.stderr and "Traceback" not in done.stderr


def test_wrong_usage_exits_with_2():
    assert metapeak().returncode == 2
    assert metapeak("estimate").returncode == 2
    assert metapeak("estimate", "x", "--batch-size", "two").returncode == 2
    assert metapeak("frobnicate").returncode == 2


@pytest.mark.parametrize("command, known", [("gpus", "rtx-4090"), ("models", "Qwen/Qwen3-8B")])
def test_catalogues(command, known):
    table, rows = metapeak(command), metapeak(command, "--json", "-")
    assert table.returncode == rows.returncode == 0
    assert known in table.stdout
    assert known in [row["id"] for row in json.loads(rows.stdout)]
