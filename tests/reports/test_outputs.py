"""Files of an estimate: all checked before the trace starts, all written, none over another."""

import json
import os
import sys

from metapeak.reports.cli import main
from tests.reports.command_line import metapeak

STEP = ("estimate", "openai-community/gpt2", "--seq-len", "16")


def test_several_outputs_at_once_beside_json_alone_on_stdout(tmp_path):
    done = metapeak(*STEP, "--json", "-", "--html", "a.html", "--perfetto", "a.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema_version"] == 1
    written = [line for line in done.stderr.splitlines() if line.startswith("wrote")]
    assert written == ["wrote a.html", "wrote a.json"]
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.json"]


def test_nothing_is_traced_or_written_when_one_output_cannot_be(tmp_path):
    (tmp_path / "old.html").write_text("old")
    cases = [
        (["--perfetto", "new.json", "--html", "old.html"], ["old.html", "--force"]),
        (["--html", "new.html", "--perfetto", "missing/a.json"], ["missing", "does not exist"]),
        (["--html", "x", "--perfetto", "./x"], ["--html", "--perfetto", "./x"]),
        (["--html", "."], ["folder"]),
    ]
    for arguments, words in cases:
        # a model that does not exist: had anything been resolved, the message would be about that
        done = metapeak("estimate", "nobody/nothing", *arguments, cwd=tmp_path)
        assert done.returncode == 1 and done.stdout == ""
        assert all(word in done.stderr for word in words), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["old.html"]
    assert (tmp_path / "old.html").read_text() == "old"


def test_the_chart_in_a_pipe_and_narrow():
    done = metapeak(*STEP, "--chart", COLUMNS="60")
    assert done.returncode == 0 and "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 60
    first = next(number for number, line in enumerate(lines) if line.startswith("Live bytes over the step"))
    assert any("pppp" in line for line in lines[first : first + 20])


def test_files_are_written_when_nobody_reads_the_text(tmp_path, monkeypatch):
    """As in `metapeak estimate ... --perfetto FILE | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.chdir(tmp_path)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main([*STEP, "--perfetto", "a.json"]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
