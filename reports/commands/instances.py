"""`metapeak instances`."""

from __future__ import annotations

import argparse
import json

from metapeak.reports.commands.base import DONE, make_console


class Instances:
    """`metapeak instances`: cloud instances with accelerators and their prices."""

    name = "instances"
    help = "cloud instances with their accelerators and prices"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--gpu", metavar="NAME", help="only those with this GPU, cheapest first")
        parser.add_argument("--cloud", metavar="NAME", help="only those of this cloud")
        parser.add_argument("--json", metavar="FILE", choices=["-"], help="- prints JSON on stdout")

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.instances import instance_records, print_instances
        from metapeak.tracer.gpus import find_gpu
        from metapeak.tracer.instances import all_instances, find_cloud

        found = list(all_instances())
        if arguments.gpu:
            gpu = find_gpu(arguments.gpu)
            found = [item for item in found if item.gpu == gpu.id]
            found.sort(key=lambda item: (item.price_hour is None, item.price_hour))
        if arguments.cloud:
            cloud = find_cloud(arguments.cloud)
            found = [item for item in found if item.cloud == cloud]
        if arguments.json:
            print(json.dumps(instance_records(found), indent=2))
        else:
            print_instances(found, make_console())
        return DONE
