"""What `metapeak estimate` does with --seq-lens."""

from __future__ import annotations

import argparse

from metapeak.reports.commands.base import DONE, check_targets, put_result
from metapeak.tracer.errors import InputError

# What belongs to one estimate.
_OF_ONE = ("html", "perfetto", "snapshot", "chart", "require_fit", "verify", "largest", "seq_len")


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """Add --seq-lens."""
    parser.add_argument(
        "--seq-lens", metavar="FILE", help="lengths of a data set's sequences, one a line: the peaks of all its batches"
    )


def run_lengths(arguments: argparse.Namespace) -> int:
    """Peaks over the batches that the file's lengths make, padded and packed."""
    from metapeak.reports.lengths import lengths_record, print_lengths
    from metapeak.reports.options import resolve_options, swept_options
    from metapeak.reports.progress import Progress
    from metapeak.strategies.lengths import distribution, read_lengths

    for name in _OF_ONE:
        if getattr(arguments, name):
            raise InputError(f"--{name.replace('_', '-')} does not go with --seq-lens.")
    swept = [name.replace("_", "-") for name in swept_options(arguments)]
    if swept:
        raise InputError(f"--seq-lens takes one value of --{swept[0]}.")
    lengths = read_lengths(arguments.seq_lens)
    options = resolve_options(arguments)
    targets = check_targets(arguments)
    with Progress() as progress:
        found = distribution(arguments.model, options, lengths, progress)
    put_result(
        arguments,
        targets,
        lambda: lengths_record(found),
        lambda console: print_lengths(found, arguments.model, console),
    )
    return DONE
