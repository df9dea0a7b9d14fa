"""`metapeak footprints`."""

from __future__ import annotations

import argparse

from metapeak.reports.commands.base import (
    BAD_INPUT,
    DONE,
    add_json,
    add_model,
    check_targets,
    put_result,
    quiet_transformers,
)
from metapeak.tracer.errors import InputError


class Footprints:
    """`metapeak footprints MODEL`: pre-training, full fine-tuning, LoRA and QLoRA side by side."""

    name = "footprints"
    help = "pre-training, full fine-tuning, LoRA and QLoRA side by side"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_model(parser)
        output = parser.add_argument_group("cases and output")
        output.add_argument(
            "--case",
            action="append",
            default=[],
            metavar="NAME:option=value;...",
            help="one more case",
        )
        output.add_argument("--only", action="store_true", help="only the cases given with --case")
        add_json(output)

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.footprints import footprints_record, parse_case, print_footprints, simulate_case
        from metapeak.reports.options import given_options
        from metapeak.reports.progress import Progress
        from metapeak.strategies.footprints import STANDARD_CASES, footprints

        quiet_transformers()
        given = given_options(arguments)
        cases = [*(() if arguments.only else STANDARD_CASES), *map(parse_case, arguments.case)]
        if not cases:
            raise InputError("--only needs at least one --case NAME:option=value.")
        targets = check_targets(arguments)
        with Progress() as progress:
            results = footprints(cases, lambda case: simulate_case(arguments.model, case, given, progress))
        put_result(arguments, targets, lambda: footprints_record(results), lambda out: print_footprints(results, out))
        return DONE if any(result.simulation is not None for result in results) else BAD_INPUT
