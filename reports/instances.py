"""The list of cloud instances, as text and as records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from metapeak.tracer.instances import COLLECTED, Instance


def instance_records(instances: Iterable[Instance]) -> list[dict[str, Any]]:
    """JSON-able rows; every row says when the prices were collected."""
    return [dataclasses.asdict(instance) | {"collected": COLLECTED} for instance in instances]


def print_instances(instances: Iterable[Instance], console: Console) -> None:
    """Print instances with their prices in USD an hour."""
    table = Table(box=None, pad_edge=False)
    for name in ("cloud", "instance", "GPU"):
        table.add_column(name, no_wrap=True)
    for name in ("count", "vCPUs", "host GiB", "$ an hour", "spot"):
        table.add_column(name, justify="right")
    table.add_column("region")
    for item in instances:
        numbers = (item.count, item.vcpus, item.host_memory_gib, item.price_hour, item.spot_price_hour)
        shown = ["" if number is None else f"{number:g}" for number in numbers]
        table.add_row(item.cloud, item.name, item.gpu or item.accelerator, *shown, item.region)
    console.print(table)
    console.print(f"List prices as collected on {COLLECTED}; spot prices were seen once. Sources: tracer/instances.py")
