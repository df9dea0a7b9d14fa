"""The table of verdicts: cases that fitted or ran out of memory, and what is predicted. `python -m` rewrites it.

verdict_table.tsv has a line a case: its id, what happened (fits, borderline, oom), the predicted verdict or `refused`,
the device bytes needed over what the GPU offers (the middle of the range), the outcome, and a note: the mechanism of a
miss, or the reason of the refusal. An outcome is `right`, `near` (wrong, but within 5 % of the capacity) or `wrong`; a
case that was borderline is right if it is predicted to be, or within 5 %.

verdict_completions.json: what a case leaves open and its source tells (the command, the script, the defaults of its
time), with where that is from; or why a case cannot be run at all.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metapeak.reports.receipt_options import options_of_receipt, reference_of
from metapeak.reports.receipts import Receipt, Refused
from metapeak.strategies.request import simulate_resolved
from metapeak.strategies.settings import options_of, resolve
from metapeak.tracer.errors import MetapeakError

CASES = Path(__file__).parent.parent / "data" / "receipts" / "verdicts.jsonl"
COMPLETIONS = Path(__file__).parent / "verdict_completions.json"
TABLE = Path(__file__).parent / "verdict_table.tsv"
HEADER = "case\thappened\tpredicted\tshare of capacity\toutcome\tnote\n"
NEAR = 0.05
WORDS = {"fits": "fits", "borderline": "borderline", "oom": "does-not-fit"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table; `share` is None for a case that is refused."""

    happened: str
    predicted: str
    share: float | None
    outcome: str
    note: str


def read_cases() -> dict[str, dict[str, Any]]:
    """The cases by id."""
    return {case["id"]: case for case in map(json.loads, CASES.read_text(encoding="utf-8").splitlines())}


def read_completions() -> dict[str, dict[str, Any]]:
    """By the id of a case what it leaves open, in the receipts' words (`case`) or ours (`options`), and where that is
    `from`; or the reason why it is `refused`.
    """
    return json.loads(COMPLETIONS.read_text(encoding="utf-8"))


def read_table() -> dict[str, Row]:
    """Every row by the id of its case."""
    if not TABLE.exists():
        return {}
    lines = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]]
    return {
        name: Row(
            happened=happened, predicted=predicted, share=float(share) if share else None, outcome=outcome, note=note
        )
        for name, happened, predicted, share, outcome, note in lines
    }


def judged(case: dict[str, Any], note: str = "") -> Row:
    """What is predicted for a case now; `note` is kept for a miss."""
    happened = case["expect"]["verdict"]
    completion = read_completions().get(case["id"], {})
    note = note or completion.get("from", "")
    try:
        if "refused" in completion:
            raise Refused(completion["refused"])
        receipt = _receipt(_completed(case, completion.get("case", {})))
        values = {**options_of_receipt(receipt), **completion.get("options", {})}
        options = resolve(options_of(values, case["id"]))
        fit = simulate_resolved(reference_of(receipt), options).fit
    except (Refused, MetapeakError) as error:
        return Row(happened=happened, predicted="refused", share=None, outcome="refused", note=str(error))
    low, high = fit.device_range
    share = (low + high) / 2 / fit.gpu.usable_bytes
    predicted = fit.verdict.value
    outcome = outcome_of(happened, predicted, share)
    return Row(happened=happened, predicted=predicted, share=round(share, 3), outcome=outcome, note=note)


def outcome_of(happened: str, predicted: str, share: float) -> str:
    """
    >>> outcome_of("oom", "does-not-fit", 1.3), outcome_of("oom", "fits", 0.97), outcome_of("fits", "does-not-fit", 1.2)
    ('right', 'near', 'wrong')
    """
    if WORDS[happened] == predicted:
        return "right"
    near = abs(share - 1) <= NEAR
    return ("right" if happened == "borderline" else "near") if near else "wrong"


def _completed(case: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The case with options of one more level put in."""
    options = dict(case["options"])
    for name, value in more.items():
        options[name] = {**(options.get(name) or {}), **value} if isinstance(value, dict) else value
    return {**case, "options": options}


def _receipt(case: dict[str, Any]) -> Receipt:
    if case["options"].get("compile"):
        raise Refused("ran under torch.compile, which is not modelled")
    if case["task"] == "inference":
        raise Refused("inference: a case for `metapeak serve`, not for a training step")
    return Receipt(
        id=case["id"],
        model=case["model"],
        definition=case["definition"],
        metric="nvml",
        rank="max",
        measured_bytes=0,
        rounding_bytes=0,
        gpu=case["gpu"],
        mechanisms=(),
        source=case["source"],
        tier="",
        fields=case,
    )


def write_table(ids: list[str]) -> None:
    """Judge these cases anew (none named: all), the table written after each; the others, and notes of misses, stay."""
    table, cases = read_table(), read_cases()
    for name, case in cases.items():
        if not ids or any(text in name for text in ids):
            old = table.get(name)
            table[name] = judged(case, old.note if old and old.outcome != "refused" else "")
            print(name, table[name], file=sys.stderr, flush=True)
            lines = [_line(known, table[known]) for known in cases if known in table]
            TABLE.write_text(HEADER + "".join(lines), encoding="utf-8")


def _line(name: str, row: Row) -> str:
    share = "" if row.share is None else f"{row.share:.3f}"
    return "\t".join([name, row.happened, row.predicted, share, row.outcome, row.note]) + "\n"


if __name__ == "__main__":
    write_table(sys.argv[1:])
