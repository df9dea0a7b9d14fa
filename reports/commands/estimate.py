"""`metapeak estimate`."""

from __future__ import annotations

import argparse

from metapeak.reports.commands.base import BORDERLINE, DOES_NOT_FIT, DONE, add_model, make_console, quiet_transformers
from metapeak.tracer.errors import InputError


class Estimate:
    """`metapeak estimate MODEL`: peak memory of one training step, where, why, does it fit."""

    name = "estimate"
    help = "peak memory of a training step, where, why, and does it fit"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from metapeak.reports.outputs import add_outputs

        add_model(parser)
        output = parser.add_argument_group("output")
        add_outputs(output)
        output.add_argument("--chart", action="store_true", help="draw live bytes over the step in the terminal")
        output.add_argument(
            "--require-fit", action="store_true", help="exit with 3 if it does not fit, 4 if it is borderline"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.options import (
            allocator_of,
            gpu_of,
            model_spec,
            resolve_options,
            step_spec,
            strategies_of,
        )
        from metapeak.reports.outputs import check_outputs, print_json, write_outputs
        from metapeak.reports.progress import Progress
        from metapeak.strategies import simulate
        from metapeak.tracer.simulation import Verdict

        quiet_transformers()
        options = resolve_options(arguments)
        gpu, allocator = gpu_of(options), allocator_of(options)
        if arguments.require_fit and gpu is None:
            raise InputError("--require-fit needs --gpu or --gpu-memory to fit into.")
        targets = check_outputs(arguments)
        with Progress() as progress:
            simulation = simulate(
                model_spec(arguments.model, options),
                step_spec(options),
                strategies_of(options),
                gpu=gpu,
                allocator=allocator,
                options=options,
                progress=progress,
            )
        # files first: whoever reads stdout may close it early
        write_outputs(simulation, targets)
        if arguments.json == "-":
            print_json(simulation)
        elif arguments.json is None:
            from metapeak.reports.summary import print_summary

            print_summary(simulation, make_console(), chart=arguments.chart)
        if arguments.require_fit and simulation.fit.verdict is not Verdict.FITS:
            return BORDERLINE if simulation.fit.verdict is Verdict.BORDERLINE else DOES_NOT_FIT
        return DONE
