"""`metapeak validate`."""

from __future__ import annotations

import argparse

from metapeak.reports.commands.base import DONE, add_json, check_targets, put_result, quiet_transformers


class Validate:
    """`metapeak validate RECEIPTS.jsonl`: predictions beside published measurements."""

    name = "validate"
    help = "predicted against published measurements"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("receipts", metavar="RECEIPTS.jsonl", help="one measurement a line")
        parser.add_argument("--only", metavar="ID[,ID]", help="receipts whose id holds one of these texts")
        parser.add_argument("--mechanism", metavar="NAME[,NAME]", help="receipts of these mechanisms")
        add_json(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.progress import Progress
        from metapeak.reports.receipts import read_receipts, selected
        from metapeak.reports.validation import print_validation, validate, validation_record

        quiet_transformers()
        receipts = selected(read_receipts(arguments.receipts), arguments.only, arguments.mechanism)
        targets = check_targets(arguments)
        with Progress() as progress:
            predictions = validate(receipts, progress)
        put_result(
            arguments, targets, lambda: validation_record(predictions), lambda out: print_validation(predictions, out)
        )
        return DONE
