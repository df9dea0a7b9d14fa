"""What would make a step fit, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from metapeak.reports.sizes import gib


def print_suggestions(suggestions: Mapping[str, Any] | None, console: Console) -> None:
    """Print the suggestions (see strategies/make_it_fit.py, suggestions_record), or what comes closest."""
    if suggestions is None:
        return
    console.print()
    shown = [
        f"{' + '.join(one['changes'])}, {gib(one['device_bytes'])} GiB ({', '.join(one['costs'])})"
        for one in suggestions["found"]
    ]
    console.print(Text.assemble(("It would fit with: ", "bold"), "; ".join(shown) or _nothing(suggestions)))
    if suggestions["left"]:
        console.print(Text(f"  ({suggestions['left']} more combinations were not tried for want of time)", style="dim"))


def _nothing(suggestions: Mapping[str, Any]) -> str:
    text, closest = "no single change or pair of those known here", suggestions["closest"]
    if closest is not None:
        name, needs = " + ".join(closest["changes"]), gib(closest["device_bytes"])
        return f"{text}; closest: {name}, {needs} GiB, {gib(-closest['headroom_bytes'])} too much"
    if suggestions["ruled_out"]:
        text += ": parameters, gradients and optimizer states alone are too large under each"
    return text
