"""The files that an estimate can write: their flags, the check before the trace starts, and the writing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from metapeak.reports.files import check_all_writable, write_whole
from metapeak.tracer.simulation import Simulation


def _json(simulation: Simulation) -> str:
    from metapeak.reports.data import record_of

    return json.dumps(record_of(simulation), indent=2) + "\n"


def _html(simulation: Simulation) -> str:
    from metapeak.reports.html_report import render_html

    return render_html(simulation)


def _perfetto(simulation: Simulation) -> str:
    from metapeak.reports.trace_event import render_trace_events

    return render_trace_events(simulation)


def _snapshot(simulation: Simulation) -> bytes:
    from metapeak.reports.memory_viz import render_snapshot

    return render_snapshot(simulation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """A kind of file: its flag, what `--help` says, and what makes the contents of a Simulation."""

    name: str
    help: str
    render: Callable[[Simulation], str | bytes]

    @property
    def flag(self) -> str:
        return f"--{self.name}"


OUTPUTS = (
    Output(name="json", help="write the result as JSON; - is stdout, alone", render=_json),
    Output(name="html", help="write a page with charts and tables that needs no network", render=_html),
    Output(name="perfetto", help="write trace events, for ui.perfetto.dev or chrome://tracing", render=_perfetto),
    Output(name="snapshot", help="write a memory snapshot (a pickle), for pytorch.org/memory_viz", render=_snapshot),
)


def add_outputs(group: argparse._ArgumentGroup) -> None:
    """Add a flag for every output, and --force."""
    for output in OUTPUTS:
        group.add_argument(output.flag, metavar="FILE", help=output.help)
    group.add_argument("--force", action="store_true", help="replace files that exist")


def check_outputs(arguments: argparse.Namespace) -> dict[str, Path]:
    """Where each output that was asked for goes, but for `--json -`. Raises InputError, before any work is done."""
    asked = {output.flag: getattr(arguments, output.name) for output in OUTPUTS}
    if asked["--json"] == "-":
        del asked["--json"]
    return check_all_writable(asked, force=arguments.force)


def write_outputs(simulation: Simulation, targets: dict[str, Path]) -> None:
    """Write every output, saying on stderr which file was written."""
    contents = [(targets[output.flag], output.render(simulation)) for output in OUTPUTS if output.flag in targets]
    for target, content in contents:
        write_whole(target, content)
        print(f"wrote {target}", file=sys.stderr)


def print_json(simulation: Simulation) -> None:
    """Print the JSON record on stdout."""
    sys.stdout.write(_json(simulation))
