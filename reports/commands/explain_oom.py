"""`metapeak explain-oom`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from metapeak.reports.commands.base import (
    DONE,
    add_json,
    add_model,
    add_suggestions,
    check_targets,
    put_result,
    quiet_transformers,
)
from metapeak.tracer.errors import InputError


class ExplainOom:
    """`metapeak explain-oom MESSAGE MODEL`: which tensor failed, at which instant, what to change."""

    name = "explain-oom"
    help = "an out-of-memory message explained: which tensor, at which instant, what was still to come, what to change"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("message", metavar="MESSAGE", help="the message, a file with it (a log), or - for stdin")
        add_model(parser)
        output = parser.add_argument_group("output")
        add_json(output)
        add_suggestions(output)

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.explain_oom import explanation_record, print_explanation
        from metapeak.reports.options import resolve_options
        from metapeak.reports.progress import Progress
        from metapeak.strategies.cached import with_suggestions
        from metapeak.strategies.explain_oom import explain_oom
        from metapeak.strategies.request import gpu_of, simulate_resolved
        from metapeak.tracer.device.oom_message import read_oom_message
        from metapeak.tracer.simulation import Option

        quiet_transformers()
        message = read_oom_message(_text_of(arguments.message))
        options = resolve_options(arguments)
        if gpu_of(options) is None and message.total is not None:
            options["gpu_memory"] = Option(value=f"{message.total.low}", origin="the message")
        targets = check_targets(arguments)
        with Progress() as progress:
            simulation = simulate_resolved(arguments.model, options, progress=progress)
            if arguments.suggestions is not False:
                simulation = with_suggestions(arguments.model, simulation, options, progress)
            progress("looking for tensors of that size")
            explanation = explain_oom(message, simulation)
        put_result(
            arguments,
            targets,
            lambda: explanation_record(explanation),
            lambda out: print_explanation(explanation, out),
        )
        return DONE


def _text_of(message: str) -> str:
    """The message itself, or what a file or stdin holds. Raises InputError for a file that cannot be read."""
    if message == "-":
        return sys.stdin.read()
    try:
        if len(message) < 4096 and "\n" not in message and Path(message).is_file():
            return Path(message).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"Cannot read {message}: {error.strerror or error}.") from error
    return message
