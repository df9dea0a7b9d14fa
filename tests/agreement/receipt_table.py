"""The table of receipts: what each published measurement is missed by, and why. `python -m` this file rewrites it.

receipt_table.tsv has a line a receipt: its id, the signed error in percent or `refused`, and a note: the mechanism of a
miss, or the reason of the refusal. Rewriting keeps the notes of misses; a new miss has to be given one by hand.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from metapeak.reports.receipts import Receipt, read_receipts
from metapeak.reports.validation import Prediction, validate

RECEIPTS = Path(__file__).parent.parent / "data" / "receipts" / "dev.jsonl"
TABLE = Path(__file__).parent / "receipt_table.tsv"


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


def write_table(predictions: list[Prediction]) -> None:
    """Put these predictions into the table; what it says of others, and the notes of misses, stays."""
    table = read_table() if TABLE.exists() else {}
    for one in predictions:
        name = one.receipt.id
        note = table[name].note if name in table and table[name].error_percent is not None else ""
        refused = one.refused is not None
        table[name] = Row(error_percent=one.error_percent, note=one.refused if refused else note)
    lines = [_line(receipt.id, table[receipt.id]) for receipt in read() if receipt.id in table]
    TABLE.write_text("receipt\terror percent\tnote\n" + "".join(lines), encoding="utf-8")


def _line(name: str, row: Row) -> str:
    error = "refused" if row.error_percent is None else f"{row.error_percent:+.4f}"
    return f"{name}\t{error}\t{row.note}\n"


if __name__ == "__main__":
    wanted = [receipt for receipt in read() if not sys.argv[1:] or any(text in receipt.id for text in sys.argv[1:])]
    write_table(validate(wanted, progress=lambda what: print(what, file=sys.stderr)))
