"""`metapeak serve`."""

from __future__ import annotations

import argparse

from metapeak.reports.commands.base import (
    DONE,
    add_json,
    add_require_fit,
    check_targets,
    exit_code,
    put_result,
    quiet_transformers,
)


class Serve:
    """`metapeak serve MODEL --gpu NAME`: weights, cache of keys and values, engine overheads, concurrent sequences."""

    name = "serve"
    help = "weights, KV cache and engine overheads of serving; how many sequences fit"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from metapeak.reports.options import add_to_parser
        from metapeak.strategies.serving.settings import SERVING_SETTINGS

        parser.add_argument("model", metavar="MODEL", help="Hugging Face id, folder, config.json or file.py:function")
        add_to_parser(parser, SERVING_SETTINGS)
        output = parser.add_argument_group("output")
        add_json(output)
        add_require_fit(output)

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.options import resolve_options
        from metapeak.reports.progress import Progress
        from metapeak.reports.serving import egress_per_million, print_serving, serving_record
        from metapeak.strategies.serving.settings import SERVING_SETTINGS, serve_resolved

        quiet_transformers()
        options = resolve_options(arguments, SERVING_SETTINGS)
        targets = check_targets(arguments)
        if "," in (options["gpu"].value or ""):
            return _compare(arguments, options, targets)
        with Progress() as progress:
            serving = serve_resolved(arguments.model, options, progress=progress)

        def show(out) -> None:
            print_serving(serving, out)
            sent = egress_per_million(options)
            if sent is not None:
                out.print(f"Sending a million tokens as text, 4 bytes each: {sent:.6g} USD.")

        put_result(arguments, targets, lambda: serving_record(serving, options), show)
        return exit_code(serving.fit.verdict) if arguments.require_fit else DONE


def _compare(arguments: argparse.Namespace, options, targets) -> int:
    """Several GPUs side by side, the cheapest that fits first."""
    from metapeak.reports.progress import Progress
    from metapeak.reports.serving_comparison import comparison_record, print_comparison
    from metapeak.strategies.serving.comparison import compare_gpus

    with Progress() as progress:
        candidates = compare_gpus(arguments.model, options, progress=progress)
    put_result(
        arguments,
        targets,
        lambda: comparison_record(candidates, options),
        lambda out: print_comparison(candidates, out),
    )
    best = next(candidate.serving for candidate in candidates if candidate.serving is not None)  # they are in order
    return exit_code(best.fit.verdict) if arguments.require_fit else DONE
