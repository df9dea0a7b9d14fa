"""Several GPUs serving one model, as text and as a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from metapeak.reports.data import SCHEMA_VERSION
from metapeak.reports.serving import serving_record, span
from metapeak.reports.sizes import gib
from metapeak.reports.summary import print_sentences
from metapeak.strategies.serving.comparison import Candidate
from metapeak.tracer.instances import COLLECTED
from metapeak.tracer.simulation import Option


def comparison_record(candidates: Sequence[Candidate], options: Mapping[str, Option]) -> dict[str, Any]:
    """The JSON-able record: every candidate in order, with the record of `serve` where it could be made."""
    return {
        "schema_version": SCHEMA_VERSION,
        "cheapest_that_fits": next((one.gpu for one in candidates if one.fits), None),
        "candidates": [
            {
                "gpu": one.gpu,
                "price_hour": one.price_hour,
                "refused": one.refused,
                "serving": serving_record(one.serving, options) if one.serving is not None else None,
            }
            for one in candidates
        ],
    }


def print_comparison(candidates: Sequence[Candidate], console: Console) -> None:
    """Print a row a GPU, then why some were refused and what was assumed."""
    table = Table(box=None, pad_edge=False)
    for name in ("GPU", "verdict"):
        table.add_column(name, no_wrap=True)
    for name in ("weights GiB", "cache GiB", "sequences", "tokens a second", "$ an hour", "$ per M tokens"):
        table.add_column(name, justify="right")
    table.add_column("cheapest on")
    for one in candidates:
        price = f"{one.price_hour:.2f}" if one.price_hour is not None else ""
        if one.serving is None:
            table.add_row(one.gpu, "refused", "", "", "", "", price, "", "")
            continue
        serving, cost = one.serving, one.cheapest
        table.add_row(
            one.gpu,
            serving.fit.verdict.value,
            gib(serving.worst.weights_bytes),
            gib(serving.worst.kv_cache_bytes),
            f"{serving.max_concurrent_sequences:,}",
            span(serving.speed.decode_batch) if serving.speed else "",
            price,
            f"{cost.on_demand[0]:.2f} to {cost.on_demand[1]:.2f}" if cost else "",
            f"{cost.instance.cloud} {cost.instance.name}" if cost else "",
        )
    console.print(table)
    console.print(f"List prices as collected on {COLLECTED}; an hour is that of one replica on the cheapest instance.")
    for one in candidates:
        if one.refused:
            console.print(f"{one.gpu}: {one.refused}")
    said = (sentence for one in candidates if one.serving for sentence in one.serving.how.assumptions)
    print_sentences("Assumed", dict.fromkeys(said), console)
