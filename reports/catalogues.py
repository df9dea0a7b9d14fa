"""Tables of what is known: `metapeak models`, `metapeak gpus`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from metapeak.reports.sizes import GIB, count
from metapeak.tracer.gpus import Gpu
from metapeak.tracer.models import CatalogueModel


def gpu_records(gpus: Iterable[Gpu]) -> list[dict[str, Any]]:
    """JSON-able rows of the GPU catalogue."""
    return [
        {
            "id": gpu.id,
            "name": gpu.name,
            "vendor": gpu.vendor,
            "architecture": gpu.architecture,
            "compute_capability": ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else None,
            "marketed_gb": gpu.marketed_gb,
            "driver_total_bytes": gpu.driver_total_bytes,
            "usable_bytes": gpu.usable_bytes,
            "usable_from": gpu.usable_from,
        }
        for gpu in gpus
    ]


def print_gpus(gpus: Iterable[Gpu], console: Console) -> None:
    """Print the GPU catalogue: GiB are what torch can use, GB what the box says."""
    table = Table(box=None, pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("name")
    table.add_column("marketed GB", justify="right")
    table.add_column("usable GiB", justify="right")
    table.add_column("compute capability")
    table.add_column("usable from")
    for gpu in gpus:
        capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else "-"
        usable = f"{gpu.usable_bytes / GIB:.2f}"
        table.add_row(gpu.id, gpu.name, f"{gpu.marketed_gb:g}", usable, capability, gpu.usable_from)
    console.print(table)


def model_records(models: Iterable[CatalogueModel]) -> list[dict[str, Any]]:
    """JSON-able rows of the model catalogue."""
    return [dataclasses.asdict(model) for model in models]


def print_models(models: Iterable[CatalogueModel], console: Console) -> None:
    """Print the model catalogue."""
    table = Table(box=None, pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("architecture")
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("dtype")
    table.add_column("also known as", overflow="fold")
    for model in models:
        table.add_row(model.id, model.architecture, count(model.params), model.dtype or "", ", ".join(model.aliases))
    console.print(table)
