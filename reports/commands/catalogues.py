"""`metapeak models` and `metapeak gpus`."""

from __future__ import annotations

import argparse
import json

from metapeak.reports.commands.base import DONE, make_console


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
