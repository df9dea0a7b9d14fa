"""The table of receipts: what each published measurement is missed by, and why.

    metapeak validate tests/data/receipts/dev.jsonl --json run.json && python -m tests.agreement.receipt_table run.json

receipt_table.tsv has a line a receipt: its id, the signed error in percent or `refused`, and a note: the mechanism of a
miss, or the reason of the refusal. Rewriting keeps the notes of misses; a new miss has to be given one by hand. A run
of every receipt also leaves its date, versions and seconds in receipt_run.json. Then calibrate.py and accuracy_table.py
write what follows from both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metapeak.reports.receipts import Receipt, read_receipts

RECEIPTS = Path(__file__).parent.parent / "data" / "receipts" / "dev.jsonl"
TABLE = Path(__file__).parent / "receipt_table.tsv"
RUN = Path(__file__).parent / "receipt_run.json"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table; `error_percent` is None for a receipt that is refused."""

    error_percent: float | None
    note: str


def read_table() -> dict[str, Row]:
    """Every row by the id of its receipt."""
    lines = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]]
    return {
        name: Row(error_percent=None if error == "refused" else float(error), note=note) for name, error, note in lines
    }


def read_run() -> dict[str, Any]:
    """Date and versions of the last run of every receipt."""
    return json.loads(RUN.read_text(encoding="utf-8"))


def steps(receipts: list[Receipt]) -> dict[str, list[Receipt]]:
    """Receipts by what they have in common: the peak and the steady bytes of one step."""
    groups: dict[str, list[Receipt]] = {}
    for receipt in receipts:
        groups.setdefault(receipt.id.removesuffix("-peak").removesuffix("-steady").removesuffix("-max"), []).append(
            receipt
        )
    return groups


def read() -> list[Receipt]:
    return read_receipts(str(RECEIPTS))


def write_table(record: Mapping[str, Any]) -> None:
    """Put the receipts of a validation's record into the table; the others, and the notes of misses, stay."""
    table = read_table() if TABLE.exists() else {}
    for row in record["receipts"]:
        name, error = row["id"], row["error_percent"]
        note = table[name].note if name in table and table[name].error_percent is not None else ""
        table[name] = Row(error_percent=error, note=note if row["refused"] is None else row["refused"])
    receipts = read()
    lines = [_line(receipt.id, table[receipt.id]) for receipt in receipts if receipt.id in table]
    TABLE.write_text("receipt\terror percent\tnote\n" + "".join(lines), encoding="utf-8")
    if len(record["receipts"]) == len(receipts):
        RUN.write_text(json.dumps({name: record[name] for name in ("date", "versions")}, indent=2) + "\n")


def _line(name: str, row: Row) -> str:
    error = "refused" if row.error_percent is None else f"{row.error_percent:+.4f}"
    return f"{name}\t{error}\t{row.note}\n"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        write_table(json.loads(Path(path).read_text(encoding="utf-8")))
