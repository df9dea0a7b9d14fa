"""A trainer and an engine on one card: as text and as a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from metapeak.reports.data import SCHEMA_VERSION
from metapeak.reports.sizes import gib
from metapeak.reports.summary import describe_step, print_sentences, verdict_line
from metapeak.strategies.colocate import Colocation, Share
from metapeak.tracer.simulation import Option


def colocation_record(found: Colocation, options: Mapping[str, Option]) -> dict[str, Any]:
    """The JSON-able record: every instant with its shares, the one that takes most, the verdict."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {"id": found.trainer.model.id, "parameters": found.trainer.model.parameters},
        "options": {name: {"value": option.value, "from": option.origin} for name, option in options.items()},
        "instants": [
            {
                "name": instant.name,
                "device_bytes": instant.device_bytes,
                "device_range": {"low": instant.device_range[0], "high": instant.device_range[1]},
                "trainer": _share(instant.trainer),
                "engine": _share(instant.engine),
                "process": _share(instant.process),
            }
            for instant in found.instants
        ],
        "peak": {"instant": found.peak.name, "device_bytes": found.peak.device_bytes},
        "host_bytes": found.host_bytes,
        "kv_tokens": found.serving.kv_tokens,
        "max_concurrent_sequences": found.serving.max_concurrent_sequences,
        "assumptions": list(found.assumptions),
        "fit": {
            "gpu": found.fit.gpu.id,
            "capacity_bytes": found.fit.gpu.usable_bytes,
            "verdict": found.fit.verdict.value,
            "headroom_bytes": found.fit.headroom_bytes,
        },
    }


def _share(share: Share) -> dict[str, Any]:
    return {"bytes": share.expected_bytes, "low": share.low_bytes, "high": share.high_bytes, "what": share.what}


def print_colocation(found: Colocation, console: Console) -> None:
    """Print the verdict, the instants, and what was assumed."""
    trainer, serving, peak = found.trainer, found.serving, found.peak
    console.print(Text.assemble((trainer.model.id, "bold"), f"   {describe_step(trainer, trainer.worst)}"))
    fraction = serving.settings.memory_fraction
    console.print(
        Text(f"beside {serving.spec.engine} with {fraction:g} of the card, {serving.kv_tokens:,} tokens of cache")
    )
    console.print(verdict_line(found.fit, peak.device_bytes))
    console.print(Text.assemble("The peak is at: ", (peak.name, "bold")))
    console.print()
    table = Table(box=None, pad_edge=False)
    for name, justify in (("instant, GiB", "left"), ("trainer", "right"), ("engine", "right"), ("both", "right")):
        table.add_column(name, justify=justify, no_wrap=True)
    table.add_column("")
    for instant in found.instants:
        table.add_row(
            instant.name,
            gib(instant.trainer.expected_bytes),
            gib(instant.engine.expected_bytes),
            gib(instant.device_bytes),
            f"{instant.trainer.what}; {instant.engine.what}" + ("  <- peak" if instant is peak else ""),
        )
    console.print(table)
    console.print(Text(f"Both counts context and libraries, {gib(peak.process.expected_bytes)} GiB, once."))
    if found.host_bytes:
        console.print(Text(f"On the host: {gib(found.host_bytes)} GiB of what was put there"))
    print_sentences("Assumed", found.assumptions, console)
