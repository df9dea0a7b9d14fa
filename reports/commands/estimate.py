"""`metapeak estimate`."""

from __future__ import annotations

import argparse
from dataclasses import replace

from metapeak.reports.commands.base import (
    DONE,
    add_cache,
    add_model,
    add_require_fit,
    add_suggestions,
    exit_code,
    make_console,
    open_cache,
    quiet_transformers,
    warn,
)
from metapeak.reports.commands.lengths import add_lengths, run_lengths
from metapeak.reports.commands.sweep import add_sweep, is_sweep, run_largest, run_sweep
from metapeak.tracer.errors import InputError


class Estimate:
    """`metapeak estimate MODEL`: peak memory of one training step, where, why, does it fit."""

    name = "estimate"
    help = "peak memory of a training step, where, why, and does it fit"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from metapeak.reports.outputs import add_outputs

        add_model(parser, several=True)
        output = parser.add_argument_group("output")
        add_outputs(output)
        output.add_argument("--chart", action="store_true", help="draw live bytes over the step in the terminal")
        output.add_argument(
            "--verify", action="store_true", help="of FSDP2: rewrite the unsharded step, too, and compare every phase"
        )
        add_suggestions(output)
        add_cache(output)
        add_sweep(parser)
        add_lengths(parser)
        add_require_fit(output)

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.options import resolve_options
        from metapeak.reports.outputs import check_outputs, print_json, write_outputs
        from metapeak.reports.progress import Progress
        from metapeak.strategies.cached import answer
        from metapeak.strategies.request import gpu_of

        quiet_transformers()
        if arguments.seq_lens is not None:
            return run_lengths(arguments)
        if is_sweep(arguments):
            return run_sweep(arguments)
        if arguments.largest is not None:
            return run_largest(arguments)
        options = resolve_options(arguments)
        if arguments.require_fit and gpu_of(options) is None:
            raise InputError("--require-fit needs --gpu or --gpu-memory to fit into.")
        targets = check_outputs(arguments)
        with Progress() as progress:
            simulation = answer(
                arguments.model,
                options,
                cache=open_cache(arguments),
                suggest=_wants_suggestions(arguments),
                whole_life=True,
                progress=progress,
                warn=warn,
            )
            if arguments.verify:
                from metapeak.strategies.parallel.verify import verified

                simulation = replace(simulation, verified=verified(arguments.model, simulation, options, progress))
        # files first: whoever reads stdout may close it early
        write_outputs(simulation, targets)
        if arguments.json == "-":
            print_json(simulation)
        elif arguments.json is None:
            from metapeak.reports.summary import print_summary

            print_summary(simulation, make_console(), chart=arguments.chart)
        return exit_code(simulation.fit.verdict) if arguments.require_fit else DONE


def _wants_suggestions(arguments: argparse.Namespace) -> bool:
    """A report for people has suggestions unless told not to; a script has to ask, as they can take a minute."""
    if arguments.suggestions is not None:
        return arguments.suggestions
    return arguments.json is None and not arguments.require_fit
