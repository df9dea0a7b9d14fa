"""The report of `metapeak explain-oom`: which tensor failed, at which instant, what was to come, what to change."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from metapeak.reports.data import SCHEMA_VERSION, model_record, options_record, suggestions_of
from metapeak.reports.make_it_fit import print_suggestions
from metapeak.reports.sizes import gib, size
from metapeak.reports.summary import print_head, print_sentences
from metapeak.strategies.explain_oom import Explanation
from metapeak.tracer.device.oom_candidates import Candidate
from metapeak.tracer.device.oom_message import OomMessage, SizeRange

CANDIDATES_SHOWN = 5
CANDIDATES_RECORDED = 20
_NUMBERS = ("requested", "total", "free", "allocated", "reserved", "process", "allowed")


def explanation_record(explanation: Explanation) -> dict[str, Any]:
    """The explanation as plain values; bytes are integers."""
    message, rank = explanation.message, explanation.rank
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model_record(explanation.simulation),
        "options": options_record(explanation.simulation),
        "message": {
            "backend": message.backend,
            "device": message.device,
            "names": "request" if message.names_request else "segment",
            **{name: _range(getattr(message, name)) for name in _NUMBERS},
        },
        "candidates": [_candidate(explanation, one) for one in explanation.candidates[:CANDIDATES_RECORDED]],
        "other_lengths": [_candidate(explanation, one) for one in explanation.other_lengths[:CANDIDATES_RECORDED]],
        "capacity_bytes": explanation.capacity_bytes,
        "capacity_from": explanation.capacity_from,
        "predicted_failure": _predicted(explanation),
        "peak": {
            "allocated_bytes": rank.allocated_bytes,
            "reserved_bytes": rank.reserved_bytes,
            "phase": rank.peak_at.phase,
            "iteration": rank.peak_at.iteration,
            "op": rank.peak_at.op,
            "module": rank.peak_at.module,
        },
        "missing_bytes": explanation.missing_bytes,
        "suggestions": suggestions_of(explanation.simulation),
    }


def _range(size_range: SizeRange | None) -> dict[str, int] | None:
    return None if size_range is None else {"low": size_range.low, "high": size_range.high}


def _candidate(explanation: Explanation, candidate: Candidate) -> dict[str, Any]:
    tensor, at = candidate.tensor, candidate.instant
    return {
        "bytes": tensor.nbytes,
        "segment_bytes": candidate.segment_bytes,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "category": tensor.category,
        "module": tensor.module or at.module,
        "count": candidate.count,
        "iteration": at.iteration,
        "phase": at.phase,
        "recompute": at.recompute,
        "op": at.op,
        "op_module": at.module,
        "source_line": tensor.source_line,
        "allocated_before_bytes": candidate.allocated_before,
        "still_to_come_bytes": explanation.still_to_come(candidate),
        "fails_here": candidate.fails_here,
        "asks_the_driver": candidate.grows,
        "tokens": candidate.tokens,
    }


def _predicted(explanation: Explanation) -> dict[str, Any] | None:
    oom = explanation.predicted.oom if explanation.predicted is not None else None
    if oom is None:
        return None
    at = explanation.rank.liveness.instant(oom.op)
    return {
        "requested_bytes": oom.requested,
        "reserved_bytes": oom.reserved,
        "iteration": at.iteration,
        "phase": at.phase,
        "op": at.op,
        "module": at.module,
    }


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print the explanation."""
    print_head(explanation.simulation, explanation.rank, console)
    console.print(Text.assemble(("The message: ", "bold"), describe_message(explanation.message)))
    if explanation.candidates:
        _print_candidates(explanation, explanation.candidates, "Tensors of that size, likeliest first", console)
    elif explanation.other_lengths:
        console.print(Text("No tensor of the simulated step has that size. At another length these have:"))
        _print_candidates(explanation, explanation.other_lengths, "Tensors that have it at other lengths", console)
    else:
        console.print(
            Text("No tensor of the simulated step has that size, at this or another length: check the options.")
        )
    _how_far(explanation, console)
    print_suggestions(explanation.simulation.suggestions, console)
    print_sentences("Assumed", explanation.simulation.how.assumptions, console)


def describe_message(message: OomMessage) -> str:
    """The numbers of the message in one line."""
    what = "request" if message.names_request else "segment"
    parts = [f"{message.backend}, {what} of {size(message.requested.middle)}"]
    if message.device is not None:
        parts.append(f"device {message.device}")
    names = {
        "total": "of total",
        "free": "free",
        "allocated": "allocated",
        "reserved": "reserved",
        "allowed": "allowed",
    }
    for name, word in names.items():
        number = getattr(message, name)
        if number is not None:
            parts.append(f"{size(number.middle)} {word}")
    return ", ".join(parts)


def _print_candidates(explanation: Explanation, candidates, title: str, console: Console) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("bytes", "tensor", "where", "when", "in use before, GiB", "then still, GiB"):
        table.add_column(name, overflow="fold", justify="right" if name.endswith("GiB") or name == "bytes" else "left")
    for candidate in candidates[:CANDIDATES_SHOWN]:
        tensor, at = candidate.tensor, candidate.instant
        shape = " x ".join(str(extent) for extent in tensor.shape) or "scalar"
        times = f" ({candidate.count} times)" if candidate.count > 1 else ""
        tokens = f", if the batch had {candidate.tokens:,} tokens" if candidate.tokens else ""
        marks = " <- fails here with that memory" if candidate.fails_here else ""
        module = candidate.module_pattern or "(the model itself)"
        table.add_row(
            size(tensor.nbytes),
            f"{tensor.category.replace('_', ' ')} {shape} {tensor.dtype}{tokens}",
            f"{at.op} in {module}{times}",
            f"iteration {at.iteration}, {at.phase}{', recompute' if at.recompute else ''}{marks}",
            gib(candidate.allocated_before),
            gib(max(0, explanation.still_to_come(candidate))),
        )
    console.print()
    console.print(table)
    if len(candidates) > CANDIDATES_SHOWN:
        console.print(Text(f"{len(candidates) - CANDIDATES_SHOWN} more"))


def _how_far(explanation: Explanation, console: Console) -> None:
    rank, at = explanation.rank, explanation.rank.peak_at
    console.print()
    peak = (
        f"the step peaks at {gib(rank.allocated_bytes)} GiB allocated, {gib(rank.reserved_bytes)} reserved, in "
        f"iteration {at.iteration}, {at.phase}, {at.op}"
    )
    if explanation.capacity_bytes is None:
        console.print(Text.assemble(("How far it had to go: ", "bold"), peak, "."))
        return
    room = f"{gib(explanation.capacity_bytes)} GiB for torch ({explanation.capacity_from})"
    missing = explanation.missing_bytes
    rest = f"{gib(missing)} GiB too much" if missing > 0 else f"{gib(-missing)} GiB would have been left"
    console.print(Text.assemble(("How far it had to go: ", "bold"), f"{peak}; there were {room}: {rest}."))
    predicted = _predicted(explanation)
    if predicted is not None:
        module = f" in {predicted['module']}" if predicted["module"] else ""
        console.print(
            Text(
                f"Simulated on that memory, the step fails in iteration {predicted['iteration']}, "
                f"{predicted['phase']}, {predicted['op']}{module}, asking for "
                f"{size(predicted['requested_bytes'])} with {gib(predicted['reserved_bytes'])} GiB reserved."
            )
        )
    elif missing <= 0:
        console.print(
            Text(
                "The simulated step fits that memory: the program held something else too (another process, an "
                "evaluation, longer samples, a second model), or its options differ from those given."
            )
        )
