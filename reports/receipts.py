"""Receipts: published measurements, read as options that `simulate` understands.

A receipt is one line of a JSON Lines file: who measured what, with which options and which code. Whatever of it cannot
be run here is refused with the reason, never left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metapeak.tracer.errors import InputError

# Metrics -> what of a prediction they are compared with.
METRICS = ("max_allocated", "steady_allocated", "max_reserved", "max_active", "nvml", "unknown-gpu")


class Refused(Exception):
    """Why a receipt cannot be predicted: what it needs that is not here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One measurement. Bytes are integers; `rounding_bytes` is half a unit of the source's last digit."""

    id: str
    model: str
    definition: str
    metric: str
    rank: str
    measured_bytes: int
    rounding_bytes: int
    gpu: str | None
    mechanisms: tuple[str, ...]
    source: str
    tier: str
    fields: Mapping[str, Any]
    # Of a value that the driver showed: what the source measured of it as the device's context; None if unknown.
    context_bytes: int | None = None

    @property
    def gradients_held(self) -> bool:
        """Whether "steady" was read while the step's gradients were still there.

        PEFT's method_comparison zeroes them at the start of the next iteration.
        """
        return self.options.get("preset") == "peft-example"

    @property
    def options(self) -> Mapping[str, Any]:
        return self.fields["options"]

    @property
    def runs_as_twin(self) -> bool:
        """Whether transformers' class is run for torchtitan's: those of a package are not cut inside or into stages."""
        degrees = self.options.get("parallel") or {}
        cut = any((degrees.get(name) or 1) > 1 for name in ("tp", "pp", "cp"))
        return cut and self.definition == "package:torchtitan" and "twin" in self.fields

    @property
    def stand_in(self) -> str | None:
        """What is run beside the measured program because that cannot be had; None where it is the program itself.

        The error against a stand-in is reported and judged by nothing.
        """
        said = []
        if self.definition == "transformers-remote-code" and "lookalike" in self.fields:
            alike = self.fields["lookalike"]
            said.append(f"a native {alike['config']['model_type']} of the same sizes ({alike['differs']})")
        if self.runs_as_twin:
            said.append("transformers' class of the same sizes, with its loss, in place of torchtitan's")
        if self.options.get("float8"):
            said.append("products in bfloat16 in place of float8")
        if self.options.get("compile"):
            said.append("the eager step in place of the compiled one")
        return " and ".join(said) or None

    @property
    def source_name(self) -> str:
        """The repository that published it, without the file and commit."""
        words = self.source.split()
        return words[0].rstrip(",:") if words else "(no source)"


def read_receipts(path: str) -> list[Receipt]:
    """The receipts of a JSON Lines file. Raises InputError, with the line, for what is none."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Cannot read {path}: {error}.") from error
    receipts = [_receipt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not receipts:
        raise InputError(f"{path} holds no receipts.")
    return receipts


def _receipt(line: str, where: str) -> Receipt:
    try:
        fields = json.loads(line)
        excluded = fields.get("baseline_excluded_bytes") or 0
        return Receipt(
            id=fields["id"],
            model=fields["model"],
            definition=fields.get("definition", "transformers"),
            metric=fields["metric"],
            rank=fields.get("rank", "rank0"),
            measured_bytes=int(fields["measured_bytes"]) + int(excluded),
            rounding_bytes=int(fields.get("rounding_bytes", 0)),
            gpu=fields.get("gpu"),
            mechanisms=tuple(fields.get("mechanism", ())),
            source=fields.get("source", ""),
            tier=fields.get("tier", ""),
            fields=fields | {"options": fields["options"]},
            context_bytes=fields.get("context_bytes"),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{where} is no receipt: {type(error).__name__}: {error}.") from error


def selected(receipts: list[Receipt], ids: str | None, mechanisms: str | None) -> list[Receipt]:
    """Those whose id holds one of `ids` and that have one of `mechanisms`; both are lists with commas, None is all.

    Raises InputError when nothing is left.
    """
    texts, wanted = (ids or "").split(","), {name for name in (mechanisms or "").split(",") if name}
    found = [
        receipt
        for receipt in receipts
        if any(text in receipt.id for text in texts) and (not wanted or wanted & set(receipt.mechanisms))
    ]
    if not found:
        known = sorted({name for receipt in receipts for name in receipt.mechanisms})
        raise InputError(f"No receipt is left of {len(receipts)}. Mechanisms: {', '.join(known)}.")
    return found


def first_batch_only(receipt: Receipt) -> bool:
    """Whether only the first batch was as long as `seq_len` says: its peak comes before anything is held over."""
    return "forced as first batch" in receipt.fields.get("notes", "") or receipt.definition == "synthetic"


def before_first_step(receipt: Receipt) -> bool:
    """Whether the value was read before training began: what was loaded, and nothing else."""
    return receipt.fields.get("notes", "").startswith("Before the first step")
