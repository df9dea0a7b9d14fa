"""The command line: parse, call, print. Everything it does can be called from Python."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from metapeak.reports.diff_command import Diff
from metapeak.tracer.errors import InputError, MetapeakError

# Exit codes of the contract.
DONE, BAD_INPUT, WRONG_USAGE, DOES_NOT_FIT, BORDERLINE, INTERRUPTED = 0, 1, 2, 3, 4, 130


class Estimate:
    """`metapeak estimate MODEL`: peak memory of one training step, where, why, does it fit."""

    name = "estimate"
    help = "peak memory of a training step, where, why, and does it fit"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from metapeak.reports.options import add_to_parser
        from metapeak.reports.outputs import add_outputs

        parser.add_argument("model", metavar="MODEL", help="Hugging Face id, folder, config.json or file.py:function")
        add_to_parser(parser)
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


class Checkpointing:
    """`metapeak checkpointing MODEL`: policies compared, layer by layer; the best plan under a budget."""

    name = "checkpointing"
    help = "gradient checkpointing policies compared, layer by layer; the best plan under a budget"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from metapeak.reports.options import add_to_parser

        parser.add_argument("model", metavar="MODEL", help="Hugging Face id, folder, config.json or file.py:function")
        add_to_parser(parser)
        output = parser.add_argument_group("plan and output")
        output.add_argument("--budget", metavar="SIZE", help="find the plan with the least recompute under 24GiB, say")
        output.add_argument("--plan", metavar="FILE", help="write the plan, for apply_checkpoint_plan")
        output.add_argument("--verify", action="store_true", help="trace every policy anew with torch.utils.checkpoint")
        output.add_argument("--json", metavar="FILE", help="write the result as JSON; - is stdout, alone")
        output.add_argument("--force", action="store_true", help="replace files that exist")

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.checkpointing import print_study, study_record
        from metapeak.reports.files import check_writable, write_whole
        from metapeak.reports.options import (
            allocator_of,
            gpu_of,
            memory_of,
            model_spec,
            model_strategies,
            resolve_options,
            step_spec,
        )
        from metapeak.reports.progress import Progress
        from metapeak.strategies.checkpoint_study import study_checkpointing, verify
        from metapeak.strategies.gradient_checkpointing import Nothing, parse_policy

        quiet_transformers()
        options = resolve_options(arguments)
        gpu, allocator = gpu_of(options), allocator_of(options)
        budget = memory_of(arguments.budget) if arguments.budget else None
        if arguments.plan and budget is None and gpu is None:
            raise InputError("--plan needs --budget, --gpu or --gpu-memory to plan for.")
        asked = parse_policy(options["checkpointing"].value)
        targets = {
            name: check_writable(path, force=arguments.force)
            for name, path in (("json", arguments.json), ("plan", arguments.plan))
            if path not in (None, "-")
        }
        model, step = model_spec(arguments.model, options), step_spec(options)
        strategies = model_strategies(options)
        with Progress() as progress:
            study = study_checkpointing(
                model,
                step,
                [] if isinstance(asked, Nothing) else [asked],
                strategies=strategies,
                budget_bytes=budget,
                gpu=gpu,
                allocator=allocator,
                options=options,
                progress=progress,
            )
            verified = None
            if arguments.verify:
                verified = {
                    result.policy: verify(
                        result, model, step, strategies=strategies, gpu=gpu, allocator=allocator, progress=progress
                    )
                    for result in study.policies
                }
        if arguments.json is None:
            print_study(study, make_console(), verified)
        else:
            text = json.dumps(study_record(study, verified), indent=2) + "\n"
            if "json" in targets:
                write_whole(targets["json"], text)
                print(f"wrote {targets['json']}", file=sys.stderr)
            else:
                sys.stdout.write(text)
        if "plan" in targets:
            write_whole(targets["plan"], json.dumps(study.plan.record(study.simulation.model.id), indent=2) + "\n")
            print(f"wrote {targets['plan']}", file=sys.stderr)
        return DONE


class Footprints:
    """`metapeak footprints MODEL`: pre-training, full fine-tuning, LoRA and QLoRA side by side."""

    name = "footprints"
    help = "pre-training, full fine-tuning, LoRA and QLoRA side by side"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from metapeak.reports.options import add_to_parser

        parser.add_argument("model", metavar="MODEL", help="Hugging Face id, folder, config.json or file.py:function")
        add_to_parser(parser)
        output = parser.add_argument_group("cases and output")
        output.add_argument(
            "--case",
            action="append",
            default=[],
            metavar="NAME:option=value;...",
            help="one more case",
        )
        output.add_argument("--only", action="store_true", help="only the cases given with --case")
        output.add_argument("--json", metavar="FILE", help="write the result as JSON; - is stdout, alone")
        output.add_argument("--force", action="store_true", help="replace files that exist")

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.files import check_writable, write_whole
        from metapeak.reports.footprints import footprints_record, parse_case, print_footprints, simulate_case
        from metapeak.reports.options import given_options
        from metapeak.reports.progress import Progress
        from metapeak.strategies.footprints import STANDARD_CASES, footprints

        quiet_transformers()
        given = given_options(arguments)
        cases = [*(() if arguments.only else STANDARD_CASES), *map(parse_case, arguments.case)]
        if not cases:
            raise InputError("--only needs at least one --case NAME:option=value.")
        target = None
        if arguments.json not in (None, "-"):
            target = check_writable(arguments.json, force=arguments.force)
        with Progress() as progress:
            results = footprints(cases, lambda case: simulate_case(arguments.model, case, given, progress))
        if arguments.json is None:
            print_footprints(results, make_console())
        else:
            text = json.dumps(footprints_record(results), indent=2) + "\n"
            if target is None:
                sys.stdout.write(text)
            else:
                write_whole(target, text)
                print(f"wrote {target}", file=sys.stderr)
        return DONE if any(result.simulation is not None for result in results) else BAD_INPUT


class Validate:
    """`metapeak validate RECEIPTS.jsonl`: predictions beside published measurements."""

    name = "validate"
    help = "predicted against published measurements"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("receipts", metavar="RECEIPTS.jsonl", help="one measurement a line")
        parser.add_argument("--only", metavar="ID[,ID]", help="receipts whose id holds one of these texts")
        parser.add_argument("--mechanism", metavar="NAME[,NAME]", help="receipts of these mechanisms")
        parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - is stdout, alone")
        parser.add_argument("--force", action="store_true", help="replace files that exist")

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.files import check_writable, write_whole
        from metapeak.reports.progress import Progress
        from metapeak.reports.receipts import read_receipts, selected
        from metapeak.reports.validation import print_validation, validate, validation_record

        quiet_transformers()
        receipts = selected(read_receipts(arguments.receipts), arguments.only, arguments.mechanism)
        target = None
        if arguments.json not in (None, "-"):
            target = check_writable(arguments.json, force=arguments.force)
        with Progress() as progress:
            predictions = validate(receipts, progress)
        if arguments.json is None:
            print_validation(predictions, make_console())
        else:
            text = json.dumps(validation_record(predictions), indent=2) + "\n"
            if target is None:
                sys.stdout.write(text)
            else:
                write_whole(target, text)
                print(f"wrote {target}", file=sys.stderr)
        return DONE


class Replay:
    """`metapeak replay SNAPSHOT...`: recorded allocator histories replayed and compared."""

    name = "replay"
    help = "recorded allocator histories (memory snapshots) replayed: what matches, request by request"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "snapshots", metavar="SNAPSHOT", nargs="+", help="a file of torch.cuda.memory._dump_snapshot(), or .xz, .gz"
        )
        parser.add_argument("--blind", action="store_true", help="invent the addresses of segments")
        parser.add_argument("--allocator-config", metavar="NAME", help="settings instead of the recorded ones")
        parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - is stdout, alone")
        parser.add_argument("--force", action="store_true", help="replace files that exist")

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.files import check_writable, write_whole
        from metapeak.reports.replay import print_replays, replay_files, replay_record

        target = None
        if arguments.json not in (None, "-"):
            target = check_writable(arguments.json, force=arguments.force)
        traces = replay_files(arguments.snapshots, blind=arguments.blind, settings=arguments.allocator_config)
        if arguments.json is None:
            print_replays(traces, make_console())
            return DONE
        text = json.dumps(replay_record(traces), indent=2) + "\n"
        if target is None:
            sys.stdout.write(text)
        else:
            write_whole(target, text)
            print(f"wrote {target}", file=sys.stderr)
        return DONE


class Models:
    """`metapeak models`: the built-in catalogue of model configs."""

    name = "models"
    help = "models whose configs are built in"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", metavar="FILE", choices=["-"], help="- prints JSON on stdout")

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.catalogues import model_records, print_models
        from metapeak.tracer.models import list_models

        if arguments.json:
            print(json.dumps(model_records(list_models()), indent=2))
        else:
            print_models(list_models(), make_console())
        return DONE


class Gpus:
    """`metapeak gpus`: the catalogue of GPUs with what torch can use of each."""

    name = "gpus"
    help = "GPUs and what torch can really use of each"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", metavar="FILE", choices=["-"], help="- prints JSON on stdout")

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.catalogues import gpu_records, print_gpus
        from metapeak.tracer.gpus import all_gpus
        from metapeak.tracer.mig import all_slices

        gpus = (*all_gpus(), *all_slices())

        if arguments.json:
            print(json.dumps(gpu_records(gpus), indent=2))
        else:
            print_gpus(gpus, make_console())
        return DONE


COMMANDS = (
    Estimate(),
    Checkpointing(),
    Footprints(),
    Validate(),
    Diff(),
    Replay(),
    Models(),
    Gpus(),
)


def quiet_transformers() -> None:
    """Remarks of transformers on a config (token ids, loss types) are for those who run the model."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def make_console():
    """A rich console on stdout. In a pipe nobody can widen the window, so lines are not folded at 80 there."""
    from rich.console import Console

    class ReportConsole(Console):
        """Leaves a reader that went away to `main`; rich would exit with 1."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    console = ReportConsole(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else ReportConsole(highlight=False, width=140)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="metapeak", description=_DESCRIPTION)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        child = commands.add_parser(command.name, help=command.help, description=command.help)
        child.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
        command.add_arguments(child)
        child.set_defaults(run=command.run)
    return parser


_DESCRIPTION = "How much GPU memory a training job needs, traced from the real model, without a GPU."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; one clear message on stderr for what cannot be used."""
    arguments = build_parser().parse_args(argv)
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
