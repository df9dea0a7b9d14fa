"""`metapeak diff` as a user meets it."""

import json
import pickle
from pathlib import Path

import pytest

from metapeak.reports.cli import main
from tests.reports.conftest import LLAMA

REAL = Path(__file__).parent.parent / "tracer" / "device" / "snapshots" / "snapshot-085.pickle.xz"
STEP = ("llama.json", "--seq-len", "32", "--batch-size", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and the snapshot of one step of it, written by --snapshot."""
    folder = tmp_path_factory.mktemp("diff")
    (folder / "llama.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 2}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["estimate", *STEP, "--snapshot", "step.pickle"]) == 0
    return folder


@pytest.fixture
def metapeak(monkeypatch, capsys):
    """The command in this process: (exit code, stdout, stderr)."""

    def run(*arguments, cwd):
        monkeypatch.chdir(cwd)
        monkeypatch.setenv("COLUMNS", "140")
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_same_options_match_whole(folder, metapeak):
    code, out, err = metapeak("diff", "step.pickle", *STEP, "--json", "-", cwd=folder)
    assert code == 0, err
    record = json.loads(out)
    assert record["recorded"]["matched"] == record["recorded"]["count"] > 0
    assert record["mostly_matched"] is True
    peak = record["peak"]
    assert peak["recorded_bytes"] == peak["predicted_bytes"] == peak["in_order_bytes"]
    assert record["missed"] == record["extra"] == []
    assert record["snapshot"] == {"file": "step.pickle", "device": 0, "has_frames": True, "before_bytes": 0}


def test_other_options_are_told_apart(folder, metapeak):
    """Recorded at batch 2, predicted at batch 4: activations are extra, and where."""
    code, out, err = metapeak("diff", "step.pickle", "llama.json", "--seq-len", "32", "--batch-size", "4", cwd=folder)
    assert code == 0, err
    text = out
    words = ["Peak recorded", "predicted", "Requests matched in order", "Missed", "Extra", "By module"]
    positions = [text.index(word) for word in words]
    assert positions == sorted(positions)
    assert "modeling_llama.py" in text[text.index("Extra") :]
    assert max(map(len, text.splitlines())) <= 140


def test_a_recording_of_something_else_is_called_that(folder, metapeak):
    code, out, err = metapeak("diff", str(REAL), *STEP, cwd=folder)
    assert code == 0, err
    assert "the recording is of another model, batch, precision or code" in " ".join(out.split())
    assert "no stack frames" in out


class Malicious:
    def __reduce__(self):
        return (open, ("harmed", "w"))


def snapshot(*traces, **more):
    return {"segments": [], "device_traces": list(traces), **more}


ALLOC = {"action": "alloc", "addr": 0, "size": 5, "stream": 0}
BAD = {
    "missing": (None, (), ["missing.pickle", "No such file"]),
    "no pickle": (b"hello", (), ["bad.pickle", "pickle"]),
    "cut off": (pickle.dumps(snapshot([ALLOC] * 9), protocol=4)[:-20], (), ["bad.pickle"]),
    "malicious": (pickle.dumps(Malicious()), (), ["refused", "plain data"]),
    "empty": (pickle.dumps(snapshot([]), protocol=4), (), ["no events", "_record_memory_history"]),
    "something else": (pickle.dumps([1, 2], protocol=4), (), ["no memory snapshot", "_dump_snapshot"]),
    "two devices": (pickle.dumps(snapshot([ALLOC], [ALLOC]), protocol=4), (), ["0, 1", "--device"]),
    "no such device": (pickle.dumps(snapshot([ALLOC]), protocol=4), ("--device", "3"), ["device 3", "of 0"]),
    "odd frames": (pickle.dumps(snapshot([{**ALLOC, "frames": [7]}]), protocol=4), (), ["frame"]),
    "taken output": (pickle.dumps(snapshot([ALLOC]), protocol=4), ("--json", "llama.json"), ["llama.json", "--force"]),
}


@pytest.mark.parametrize("content, more, words", BAD.values(), ids=BAD)
def test_bad_input_gets_one_clear_message_before_anything_is_traced(content, more, words, tmp_path, folder, metapeak):
    name = "missing.pickle" if content is None else "bad.pickle"
    if content is not None:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "llama.json").write_text((folder / "llama.json").read_text())
    before = sorted(tmp_path.iterdir())
    code, out, err = metapeak("diff", name, "nobody/nothing", *more, cwd=tmp_path)
    assert code == 1 and out == ""
    assert "Traceback" not in err and "nobody" not in err
    assert all(word in err for word in words), err
    assert sorted(tmp_path.iterdir()) == before
