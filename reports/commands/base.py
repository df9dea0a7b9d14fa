"""What commands share: exit codes, the console, a result that is text or JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metapeak.reports.files import check_all_writable, write_whole

if TYPE_CHECKING:
    from metapeak.tracer.simulation import Verdict

# Exit codes of the contract.
DONE, BAD_INPUT, WRONG_USAGE, DOES_NOT_FIT, BORDERLINE, INTERRUPTED = 0, 1, 2, 3, 4, 130


def exit_code(verdict: Verdict) -> int:
    """The exit code of a verdict, where a fit is required."""
    return {"fits": DONE, "borderline": BORDERLINE, "does-not-fit": DOES_NOT_FIT}[verdict.value]


def add_require_fit(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --require-fit, which `exit_code` answers."""
    group.add_argument(
        "--require-fit", action="store_true", help="exit with 3 if it does not fit, 4 if it is borderline"
    )


def quiet_transformers() -> None:
    """Remarks of transformers on a config (token ids, loss types) are for those who run the model, those of torch on
    timers that a device lacks for those who own it.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def make_console():
    """A rich console on stdout. In a pipe nobody can widen the window, so lines are not folded at 80 there."""
    from rich.console import Console

    class ReportConsole(Console):
        """Leaves a reader that went away to `main`; rich would exit with 1."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    console = ReportConsole(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else ReportConsole(highlight=False, width=140)


def add_model(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add MODEL and every option of an estimate; `several`: which may have several values."""
    from metapeak.reports.options import add_to_parser

    parser.add_argument("model", metavar="MODEL", help="Hugging Face id, folder, config.json or file.py:function")
    add_to_parser(parser, several=several)


def add_json(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --json and --force."""
    group.add_argument("--json", metavar="FILE", help="write the result as JSON; - is stdout, alone")
    group.add_argument("--force", action="store_true", help="replace files that exist")


def add_suggestions(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --suggestions and --no-suggestions; None is the command's own default."""
    group.add_argument(
        "--suggestions",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="simulate what would make it fit, if it does not",
    )


def add_cache(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --no-cache."""
    group.add_argument("--no-cache", action="store_true", help="answer anew, and keep nothing (see metapeak cache)")


def open_cache(arguments: argparse.Namespace):
    """The cache on disk, or None where --no-cache or METAPEAK_CACHE=off says so."""
    from metapeak.tracer.disk_cache import DiskCache, cache_folder

    folder = None if arguments.no_cache else cache_folder()
    return DiskCache(folder) if folder is not None else None


def warn(problem: str) -> None:
    """A remark on stderr that changes nothing about the answer."""
    print(f"metapeak: {problem}", file=sys.stderr)


def check_targets(arguments: argparse.Namespace, *more: str) -> dict[str, Path]:
    """Where --json (unless it is -) and the flags of `more` write. Raises InputError before any work is done."""
    asked = {f"--{name}": getattr(arguments, name) for name in ("json", *more)}
    if asked["--json"] == "-":
        del asked["--json"]
    return check_all_writable(asked, force=arguments.force)


def put_result(
    arguments: argparse.Namespace,
    targets: Mapping[str, Path],
    record: Callable[[], Any],
    show: Callable[[Any], None],
) -> None:
    """Show the result on a console, or write its record as JSON where --json says."""
    if arguments.json is None:
        show(make_console())
    elif "--json" in targets:
        put_file(targets["--json"], record())
    else:
        sys.stdout.write(_json(record()))


def put_file(target: Path, record: Any) -> None:
    """Write a record as a JSON file, saying so on stderr."""
    write_whole(target, _json(record))
    print(f"wrote {target}", file=sys.stderr)


def _json(record: Any) -> str:
    return json.dumps(record, indent=2) + "\n"
