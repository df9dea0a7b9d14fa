"""The command line: parse, call, print. Everything it does can be called from Python."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from metapeak.reports.commands.base import BAD_INPUT, DONE, INTERRUPTED
from metapeak.reports.commands.cache import Cache
from metapeak.reports.commands.catalogues import Gpus, Models
from metapeak.reports.commands.checkpointing import Checkpointing
from metapeak.reports.commands.colocate import Colocate
from metapeak.reports.commands.diff import Diff
from metapeak.reports.commands.estimate import Estimate
from metapeak.reports.commands.explain_oom import ExplainOom
from metapeak.reports.commands.footprints import Footprints
from metapeak.reports.commands.instances import Instances
from metapeak.reports.commands.plan import PlanCommand
from metapeak.reports.commands.replay import Replay
from metapeak.reports.commands.serve import Serve
from metapeak.reports.commands.validate import Validate
from metapeak.tracer.errors import MetapeakError

COMMANDS = (
    Estimate(),
    Checkpointing(),
    Footprints(),
    PlanCommand(),
    Serve(),
    Colocate(),
    ExplainOom(),
    Validate(),
    Diff(),
    Replay(),
    Models(),
    Gpus(),
    Instances(),
    Cache(),
)


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands; with `only`, the options of that one alone: those of others cost their imports."""
    parser = argparse.ArgumentParser(prog="metapeak", description=_DESCRIPTION)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        child = commands.add_parser(command.name, help=command.help, description=command.help)
        child.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
        if only in (None, command.name):
            command.add_arguments(child)
        child.set_defaults(run=command.run)
    return parser


_DESCRIPTION = "How much GPU memory a training job needs, traced from the real model, without a GPU."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; one clear message on stderr for what cannot be used."""
    words = sys.argv[1:] if argv is None else argv
    named = next((word for word in words if not word.startswith("-")), None)
    known = named in {command.name for command in COMMANDS}
    arguments = build_parser(named if known else None).parse_args(words)
    try:
        return arguments.run(arguments)
    except MetapeakError as error:
        if arguments.debug:
            raise
        print(f"metapeak: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        # A KeyboardInterrupt that passes through exec() of a string (dataclasses and namedtuples are made so, thus
        # any import) leaves a mark in CPython by which `python -m` kills itself at exit; the next exec() wipes it.
        exec("")
        print("metapeak: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe is gone: what it wanted, it has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


if __name__ == "__main__":
    sys.exit(main())
