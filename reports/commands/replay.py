"""`metapeak replay`."""

from __future__ import annotations

import argparse

from metapeak.reports.commands.base import DONE, add_json, check_targets, put_result


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
        add_json(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.replay import print_replays, replay_files, replay_record

        targets = check_targets(arguments)
        traces = replay_files(arguments.snapshots, blind=arguments.blind, settings=arguments.allocator_config)
        put_result(arguments, targets, lambda: replay_record(traces), lambda out: print_replays(traces, out))
        return DONE
