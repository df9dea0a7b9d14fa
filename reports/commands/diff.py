"""`metapeak diff`."""

from __future__ import annotations

import argparse

from metapeak.reports.commands.base import DONE, add_json, add_model, check_targets, put_result, quiet_transformers


class Diff:
    """`metapeak diff SNAPSHOT MODEL`: a recorded memory snapshot beside the prediction: what was missed."""

    name = "diff"
    help = "a memory snapshot of your GPU beside the prediction: what matches, what was missed"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("snapshot", metavar="SNAPSHOT", help="a file of torch.cuda.memory._dump_snapshot()")
        add_model(parser)
        output = parser.add_argument_group("recording and output")
        output.add_argument("--device", type=int, metavar="N", help="whose events, if the file has several devices'")
        add_json(output)

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.diff import diff_record, print_diff
        from metapeak.reports.options import resolve_options
        from metapeak.reports.progress import Progress
        from metapeak.strategies.request import simulate_resolved
        from metapeak.tracer.device.comparison import compare
        from metapeak.tracer.device.recording import recording_of
        from metapeak.tracer.device.snapshot_reader import read_snapshot

        quiet_transformers()
        options = resolve_options(arguments)
        targets = check_targets(arguments)
        with Progress() as progress:
            # the recording first: what is wrong with it is known before the seconds that a trace takes
            progress(f"reading {arguments.snapshot}")
            recording = recording_of(read_snapshot(arguments.snapshot), arguments.device)
            simulation = simulate_resolved(arguments.model, options, progress=progress)
            progress("matching requests")
            rank = simulation.worst
            comparison = compare(recording, rank.liveness)
        put_result(
            arguments,
            targets,
            lambda: diff_record(arguments.snapshot, comparison, simulation),
            lambda out: print_diff(arguments.snapshot, comparison, simulation, rank, out),
        )
        return DONE
