"""The command `metapeak diff SNAPSHOT MODEL`."""

from __future__ import annotations

import argparse
import json
import sys


class Diff:
    """`metapeak diff SNAPSHOT MODEL`: a recorded memory snapshot beside the prediction: what was missed."""

    name = "diff"
    help = "a memory snapshot of your GPU beside the prediction: what matches, what was missed"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from metapeak.reports.options import add_to_parser

        parser.add_argument("snapshot", metavar="SNAPSHOT", help="a file of torch.cuda.memory._dump_snapshot()")
        parser.add_argument("model", metavar="MODEL", help="Hugging Face id, folder, config.json or file.py:function")
        add_to_parser(parser)
        output = parser.add_argument_group("recording and output")
        output.add_argument("--device", type=int, metavar="N", help="whose events, if the file has several devices'")
        output.add_argument("--json", metavar="FILE", help="write the result as JSON; - is stdout, alone")
        output.add_argument("--force", action="store_true", help="replace files that exist")

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.cli import DONE, make_console, quiet_transformers
        from metapeak.reports.diff import diff_record, print_diff
        from metapeak.reports.files import check_all_writable, write_whole
        from metapeak.reports.options import allocator_of, gpu_of, model_spec, resolve_options, step_spec, strategies_of
        from metapeak.reports.progress import Progress
        from metapeak.strategies import simulate
        from metapeak.tracer.device.comparison import compare
        from metapeak.tracer.device.recording import recording_of
        from metapeak.tracer.device.snapshot_reader import read_snapshot

        quiet_transformers()
        options = resolve_options(arguments)
        targets = check_all_writable(
            {"--json": arguments.json if arguments.json != "-" else None}, force=arguments.force
        )
        with Progress() as progress:
            # the recording first: what is wrong with it is known before the seconds that a trace takes
            progress(f"reading {arguments.snapshot}")
            recording = recording_of(read_snapshot(arguments.snapshot), arguments.device)
            simulation = simulate(
                model_spec(arguments.model, options),
                step_spec(options),
                strategies_of(options),
                gpu=gpu_of(options),
                allocator=allocator_of(options),
                options=options,
                progress=progress,
            )
            progress("matching requests")
            rank = simulation.worst
            comparison = compare(recording, rank.liveness)
        if arguments.json is None:
            print_diff(arguments.snapshot, comparison, simulation, rank, make_console())
            return DONE
        text = json.dumps(diff_record(arguments.snapshot, comparison, simulation), indent=2) + "\n"
        if "--json" in targets:
            write_whole(targets["--json"], text)
            print(f"wrote {targets['--json']}", file=sys.stderr)
        else:
            sys.stdout.write(text)
        return DONE
