"""What `metapeak estimate` does with several values of an option, and with --largest."""

from __future__ import annotations

import argparse
import sys

from metapeak.reports.commands.base import DONE, check_targets, put_result
from metapeak.reports.files import write_whole
from metapeak.tracer.errors import InputError, UnknownName

# Reports of one estimate; a sweep has none of them.
_OF_ONE = ("html", "perfetto", "snapshot", "chart", "require_fit")
_OF_MANY = ("csv", "parquet", "heatmap")


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the outputs of a sweep, and --largest."""
    group = parser.add_argument_group(
        "sweeps", "an option with several values (--seq-len 2048,4096 --method full,lora) makes an estimate for each"
    )
    group.add_argument("--csv", metavar="FILE", help="write a row for each combination")
    group.add_argument("--parquet", metavar="FILE", help="the same as Parquet (needs pyarrow)")
    group.add_argument("--heatmap", metavar="FILE", help="write a page with a heat map of the last two options")
    group.add_argument(
        "--jobs", type=int, metavar="N", help="processes that simulate; default 1, of --backend all cores"
    )
    group.add_argument(
        "--backend",
        choices=("loky", "dask", "ray"),
        help="of joblib: dask and ray take the cluster that DASK_SCHEDULER_ADDRESS or RAY_ADDRESS names",
    )
    group.add_argument(
        "--largest", metavar="NAME", help="search the largest value that fits: batch_size, seq_len, image_size, ..."
    )


def is_sweep(arguments: argparse.Namespace) -> bool:
    """Whether an option has several values. Raises InputError for outputs of a sweep without one."""
    from metapeak.reports.options import swept_options

    if swept_options(arguments):
        return True
    asked = [name for name in (*_OF_MANY, "jobs", "backend") if getattr(arguments, name) is not None]
    if asked:
        raise InputError(f"--{asked[0]} is for sweeps: give an option several values, as --seq-len 2048,4096.")
    return False


def run_sweep(arguments: argparse.Namespace) -> int:
    """Estimate every combination and report them together."""
    from metapeak.reports.options import options_of_point, swept_options
    from metapeak.reports.progress import Progress
    from metapeak.reports.sweep import (
        check_heatmap,
        check_parquet,
        print_sweep,
        sweep_csv,
        sweep_heatmap,
        sweep_parquet,
        sweep_record,
    )
    from metapeak.strategies.processes import cores
    from metapeak.strategies.sweep import sweep

    swept = swept_options(arguments)
    if arguments.jobs is not None and arguments.jobs < 1:
        raise InputError(f"--jobs is {arguments.jobs}, but has to be at least 1.")
    _refuse(arguments, "several values of an option", (*_OF_ONE, "largest"))
    if arguments.parquet is not None:
        check_parquet()
    if arguments.heatmap is not None:
        check_heatmap(swept)
    targets = check_targets(arguments, *_OF_MANY)
    with Progress() as progress:
        found = sweep(
            arguments.model,
            swept,
            lambda values: options_of_point(arguments, values),
            jobs=arguments.jobs or (cores() if arguments.backend else 1),
            backend=arguments.backend,
            progress=progress,
        )
    for name, render in {"csv": sweep_csv, "parquet": sweep_parquet, "heatmap": sweep_heatmap}.items():
        if f"--{name}" in targets:
            write_whole(targets[f"--{name}"], render(found))
            print(f"wrote {targets[f'--{name}']}", file=sys.stderr)
    put_result(arguments, targets, lambda: sweep_record(found), lambda console: print_sweep(found, console))
    return DONE


def run_largest(arguments: argparse.Namespace) -> int:
    """Search the largest value of an option that fits, and report the estimate at it."""
    from metapeak.reports.data import record_of
    from metapeak.reports.options import options_of_point, resolve_options
    from metapeak.reports.progress import Progress
    from metapeak.reports.summary import print_summary
    from metapeak.reports.sweep import describe_largest, largest_record
    from metapeak.strategies.request import gpu_of
    from metapeak.strategies.shared_trace import SharedTraces
    from metapeak.strategies.sweep import SEARCHED, largest_that_fits

    name = arguments.largest.replace("-", "_")
    if name not in SEARCHED:
        raise UnknownName("option to search", arguments.largest, SEARCHED)
    _refuse(arguments, "--largest", _OF_ONE)
    if getattr(arguments, name) is not None:
        raise InputError(f"--largest {name} searches {name}, but --{name.replace('_', '-')} is given. Leave one out.")
    if gpu_of(resolve_options(arguments)) is None:
        raise InputError("--largest needs --gpu or --gpu-memory to fit into.")
    targets = check_targets(arguments)
    traces = SharedTraces(arguments.model)
    with Progress() as progress:
        found = largest_that_fits(
            name, lambda value: traces.simulate(options_of_point(arguments, {name: value})), progress=progress
        )

    def show(console) -> None:
        console.print(describe_largest(found), style="bold", markup=False)
        print_summary(found.simulation, console)

    put_result(arguments, targets, lambda: {**record_of(found.simulation), "largest": largest_record(found)}, show)
    return DONE


def _refuse(arguments: argparse.Namespace, what: str, names) -> None:
    for name in names:
        if getattr(arguments, name):
            raise InputError(f"--{name.replace('_', '-')} is for one estimate and does not go with {what}.")
