"""`metapeak replay` as a user meets it."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from metapeak.reports.cli import main
from tests.reports.command_line import metapeak

FOLDER = Path(__file__).parent.parent / "tracer" / "device" / "snapshots"
FILES = [str(FOLDER / f"snapshot-{number}.pickle.xz") for number in ("085", "053")]


def test_the_record_is_the_contracts(capsys):
    assert main(["replay", *FILES, "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    first, second = record["traces"]
    assert first["file"] == FILES[0] and first["device"] == 0 and first["starts_empty"]
    assert first["growths"] == {"recorded": 9, "matched": 9, "false": 0}
    assert first["releases"] == {"recorded": 0, "matched": 0, "false": 0}
    assert first["peak_reserved"] == {"recorded": 3606 << 20, "replayed": 3606 << 20}
    assert first["addresses"] == {"recorded": 36, "matched": 36}
    assert second["settings"] == "expandable_segments:True, as recorded"
    assert record["summary"]["traces"] == record["summary"]["exact"] == 2
    assert record["summary"]["addresses"] == {"recorded": 1740, "matched": 1740}


def test_the_table_says_what_matched(capsys):
    assert main(["replay", *FILES]) == 0
    out = capsys.readouterr().out
    assert "9 of 9" in out and "1,704 of 1,704" in out
    assert "2 of 2 traces replayed exactly, with the recorded segment addresses." in out
    assert main(["replay", FILES[0], "--blind"]) == 0
    assert "with invented segment addresses" in capsys.readouterr().out


def test_other_settings_show_as_differences(capsys):
    assert main(["replay", FILES[0], "--allocator-config", "expandable_segments:True", "--json", "-"]) == 0
    (trace,) = json.loads(capsys.readouterr().out)["traces"]
    assert trace["growths"]["false"] > 0 and not trace["exact"]
    assert trace["settings"] == "expandable_segments:True, as given"


def test_a_file_is_written_and_not_over_another(tmp_path, capsys):
    target = tmp_path / "out.json"
    assert main(["replay", FILES[0], "--json", str(target)]) == 0
    assert json.loads(target.read_text())["summary"]["exact"] == 1
    assert main(["replay", FILES[0], "--json", str(target)]) == 1
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, words",
    [
        (b"nonsense", ["bad.pickle", "no whole pickle"]),
        (pickle.dumps(print), ["bad.pickle", "refused", "GLOBAL"]),
        (pickle.dumps({"a": 1}), ["bad.pickle", "no memory snapshot", "_dump_snapshot"]),
        (pickle.dumps({"segments": [], "device_traces": [[], []]}), ["bad.pickle", "_record_memory_history"]),
        (
            pickle.dumps(
                {
                    "segments": [],
                    "device_traces": [[{"action": "free_completed", "addr": 4096, "size": 1, "stream": 0}]],
                }
            ),
            ["contradicts itself"],
        ),
    ],
)
def test_bad_input_gets_one_clear_message(content, words, tmp_path, capsys):
    path = tmp_path / "bad.pickle"
    path.write_bytes(content)
    assert main(["replay", FILES[0], str(path), "--json", "-"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.strip().splitlines()) == 1
    for word in words:
        assert word in captured.err


def test_an_unknown_setting_and_no_file(tmp_path, capsys):
    assert main(["replay", FILES[0], "--allocator-config", "max_split:3"]) == 1
    assert "max_split_size_mb" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none.pickle")]) == 1
    assert "none.pickle" in capsys.readouterr().err


def test_it_needs_no_torch():
    done = metapeak("replay", FILES[0], "--json", "-")
    assert done.returncode == 0 and done.stderr == ""
    code = "import sys; from metapeak.reports.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, "replay", FILES[0]], capture_output=True).returncode == 0
