"""On a real terminal: progress after a second, and Ctrl-C that leaves no mess."""

import os
import pty
import subprocess
import sys
import time

import pytest


def in_a_terminal(arguments, interrupt_after=None):
    """(exit code, everything that the terminal showed)."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(HF_HUB_OFFLINE="1", TERM="xterm", COLUMNS="100")
        os.execv(sys.executable, [sys.executable, "-m", "metapeak.reports.cli", *arguments])
    shown, started, interrupted = b"", time.monotonic(), False
    os.set_blocking(terminal, False)
    while True:
        try:
            chunk = os.read(terminal, 65536)
            if not chunk:
                break
            shown += chunk
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # the child closed its side
            break
        waited = time.monotonic() - started
        if interrupt_after is not None and not interrupted and interrupt_after(waited, shown):
            os.write(terminal, b"\x03")
            interrupted = True
        assert waited < 120
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown.decode(errors="replace")


def test_progress_is_shown_and_goes_away():
    code, shown = in_a_terminal(["estimate", "openai-community/gpt2", "--seq-len", "64"])
    assert code == 0
    assert "importing torch and transformers" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor came back


@pytest.mark.parametrize("stage", ["importing", "building", "iteration 1: forward", "iteration 1: backward"])
def test_ctrl_c_leaves_no_mess(stage):
    code, shown = in_a_terminal(
        ["estimate", "meta-llama/Llama-3.1-405B"], interrupt_after=lambda waited, shown: stage.encode() in shown
    )
    assert code == 130
    assert "metapeak: interrupted" in shown
    assert "Traceback" not in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")


def test_an_interrupt_inside_exec_exits_with_130(tmp_path):
    """CPython remembers such an interrupt, and `python -m` would die of SIGINT in spite of the exit code."""
    (tmp_path / "interrupted.py").write_text(
        "import sys\n"
        "from metapeak.reports import cli\n"
        "cli.Models.run = lambda self, arguments: exec('raise KeyboardInterrupt')\n"
        "sys.exit(cli.main(['models']))\n"
    )
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "metapeak: interrupted\n")
