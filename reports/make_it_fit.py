"""Suggestions as text and as plain values."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from metapeak.reports.sizes import gib
from metapeak.strategies.make_it_fit import MakeItFit, Suggestion


def suggestions_record(fit: MakeItFit | None) -> list[dict[str, Any]] | None:
    """The suggestions, cheapest first; None where none were asked for or the step fits."""
    if fit is None:
        return None
    return [_record(suggestion) for suggestion in fit.suggestions]


def _record(suggestion: Suggestion) -> dict[str, Any]:
    found = suggestion.simulation
    options: dict[str, Any] = {}
    for change in suggestion.changes:
        options |= change.options
    return {
        "changes": [change.name for change in suggestion.changes],
        "options": options,
        "device_bytes": suggestion.device_bytes,
        "headroom_bytes": found.fit.headroom_bytes,
        "verdict": found.fit.verdict.value,
        "extra_flops_percent": suggestion.extra_flops_percent,
        "costs": list(suggestion.costs),
    }


def print_suggestions(fit: MakeItFit | None, console: Console) -> None:
    """Print what would fit, or what comes closest."""
    if fit is None:
        return
    console.print()
    if fit.suggestions:
        shown = "; ".join(
            f"{one.name}, {gib(one.device_bytes)} GiB ({', '.join(one.costs)})" for one in fit.suggestions
        )
        console.print(Text.assemble(("It would fit with: ", "bold"), shown))
    else:
        console.print(Text.assemble(("It would fit with: ", "bold"), _nothing(fit)))
    if fit.left:
        console.print(Text(f"  ({fit.left} more combinations were not tried for want of time)", style="dim"))


def _nothing(fit: MakeItFit) -> str:
    text = "no single change or pair of those known here"
    if fit.closest is not None:
        missing = gib(-fit.closest.simulation.fit.headroom_bytes)
        text += f"; closest: {fit.closest.name}, {gib(fit.closest.device_bytes)} GiB, {missing} too much"
    elif fit.ruled_out:
        text += ": parameters, gradients and optimizer states alone are too large under each"
    return text
