"""`metapeak validate`."""

from __future__ import annotations

import argparse
import os

from metapeak.reports.commands.base import (
    DONE,
    INTERRUPTED,
    add_cache,
    add_json,
    check_targets,
    open_cache,
    put_result,
    quiet_transformers,
)
from metapeak.tracer.errors import InputError


class Validate:
    """`metapeak validate RECEIPTS.jsonl`: predictions beside published measurements."""

    name = "validate"
    help = "predicted against published measurements"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("receipts", metavar="RECEIPTS.jsonl", help="one measurement a line")
        parser.add_argument("--only", metavar="ID[,ID]", help="receipts whose id holds one of these texts")
        parser.add_argument("--mechanism", metavar="NAME[,NAME]", help="receipts of these mechanisms")
        parser.add_argument("--jobs", type=int, metavar="N", help="processes at once; default the cores there are")
        add_json(parser)
        parser.add_argument("--html", metavar="FILE", help="write a page that needs no network")
        add_cache(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.files import write_whole
        from metapeak.reports.progress import Progress
        from metapeak.reports.receipts import read_receipts, selected
        from metapeak.reports.validation_report import print_validation, render_validation_html, validation_record
        from metapeak.reports.validation_run import validate

        quiet_transformers()
        receipts = selected(read_receipts(arguments.receipts), arguments.only, arguments.mechanism)
        targets = check_targets(arguments, "html")
        with Progress() as progress:
            found = validate(receipts, progress, jobs=_jobs(arguments), cache=open_cache(arguments))
        rows, how = found.predictions, {"interrupted": found.interrupted}
        if "--html" in targets:
            write_whole(targets["--html"], render_validation_html(rows, **how))
        put_result(
            arguments, targets, lambda: validation_record(rows, **how), lambda out: print_validation(rows, out, **how)
        )
        return INTERRUPTED if found.interrupted else DONE


def _jobs(arguments: argparse.Namespace) -> int:
    """The processes asked for, or as many as this process may use cores. Raises InputError."""
    if arguments.jobs is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if arguments.jobs < 1:
        raise InputError(f"--jobs is {arguments.jobs}, but has to be 1 or more.")
    return arguments.jobs
