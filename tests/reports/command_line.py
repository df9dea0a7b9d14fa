"""Commands as a user meets them: in a process of their own, or (seconds faster) in this one."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from metapeak.reports.cli import main

VARIABLES = {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "140", "METAPEAK_CACHE": "off"}


def in_a_process(*arguments, cwd=None, **environment):
    """A finished `python -m metapeak.reports.cli ...`."""
    return subprocess.run(
        [sys.executable, "-m", "metapeak.reports.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **VARIABLES, **environment},
        check=False,
    )


def metapeak(*arguments, cwd=None, **environment):
    """The same from a call of `main`: what a terminal shows, what goes to stderr, the exit code."""
    out, err, here = io.StringIO(), io.StringIO(), Path.cwd()
    with (
        mock.patch.dict(os.environ, {**VARIABLES, **environment}),
        mock.patch.object(sys, "dont_write_bytecode", True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        os.chdir(cwd or here)
        try:
            code = main(arguments)
        except SystemExit as usage:
            code = usage.code
        finally:
            os.chdir(here)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
