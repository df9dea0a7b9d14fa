"""README's accuracy table, from receipt_table.tsv and verdict_table.tsv: `python -m` puts it between README's marks."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from metapeak.reports.receipts import Receipt
from metapeak.reports.validation_report import percentile_95
from tests.agreement import receipt_table, verdict_table
from tests.agreement.receipt_table import Row

README = Path(__file__).parent.parent.parent / "README.md"
BEGIN, END = "<!-- accuracy: python -m tests.agreement.accuracy_table -->\n", "<!-- end of accuracy -->"
COUNTERS = ("max_allocated", "max_active", "steady_allocated")
# Reasons that differ only in a name are one reason: beginning of the refusal -> what the table says.
REASONS = {
    "the model's code is": "code of {definition} not built here",
    "the measured program is of another kind": "{definition} layers",
    "the model's code lies": "code in its repository",
    "runs on several GPUs": "several GPUs of another engine",
    "runs with": "pipeline, context or expert parallel",
    "computes in float8": "float8",
    "the optimizer runs on the host": "optimizer on the host",
    "metric": "statistic unstated",
    "kernels fused-lora": "fused LoRA under FSDP1",
}


def accuracy() -> str:
    """The section as Markdown: a line a definition, the errors beyond the source's rounding, refusals by reason."""
    table, run = receipt_table.read_table(), receipt_table.read_run()
    receipts = receipt_table.read()
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)
    lines = [
        f"`metapeak validate tests/data/receipts/dev.jsonl`, {run['date']}, {versions}. |error| in percent, what is "
        "left of it beyond half a unit of the source's last digit: median / 95th percentile.",
        "",
        "| whose code ran | rows | byte-exact peak | byte-exact steady | all allocated, active | reserved, device | "
        "run | refused |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for definition in sorted({receipt.definition for receipt in receipts}):
        rows = [receipt for receipt in receipts if receipt.definition == definition and receipt.stand_in is None]
        if rows:
            lines.append(_line(definition, rows, table))
    beside = [receipt for receipt in receipts if receipt.stand_in is not None]
    lines += ["", _beside(beside, table), "", _verdicts()]
    return "\n".join(lines) + "\n"


def _line(definition: str, rows: Sequence[Receipt], table: dict[str, Row]) -> str:
    exact = [receipt for receipt in rows if receipt.rounding_bytes == 0]
    cells = [
        _errors([receipt for receipt in exact if receipt.metric == "max_allocated"], table),
        _errors([receipt for receipt in exact if receipt.metric == "steady_allocated"], table),
        _errors([receipt for receipt in rows if receipt.metric in COUNTERS], table),
        _errors([receipt for receipt in rows if receipt.metric not in COUNTERS], table),
    ]
    refused = [receipt for receipt in rows if table[receipt.id].error_percent is None]
    run = len(rows) - len(refused)
    return f"| {definition} | {len(rows)} | {' | '.join(cells)} | {run} | {_reasons(refused, table)} |"


def _errors(rows: Sequence[Receipt], table: dict[str, Row]) -> str:
    errors = [
        _beyond_rounding(receipt, table[receipt.id]) for receipt in rows if table[receipt.id].error_percent is not None
    ]
    return f"{statistics.median(errors):.3g} / {percentile_95(errors):.3g} ({len(errors)})" if errors else ""


def _beyond_rounding(receipt: Receipt, row: Row) -> float:
    return max(abs(row.error_percent) - 100 * receipt.rounding_bytes / receipt.measured_bytes, 0.0)


def _reasons(refused: Sequence[Receipt], table: dict[str, Row]) -> str:
    counts = Counter(_reason(receipt, table[receipt.id].note) for receipt in refused)
    return "; ".join(f"{count} {reason}" for reason, count in counts.most_common())


def _reason(receipt: Receipt, note: str) -> str:
    name = receipt.definition.removeprefix("package:")
    return next((text.format(definition=name) for start, text in REASONS.items() if note.startswith(start)), note)


def _beside(rows: Sequence[Receipt], table: dict[str, Row]) -> str:
    compiled = [receipt for receipt in rows if receipt.options.get("compile")]
    alike = [receipt for receipt in rows if not receipt.options.get("compile")]
    return (
        "Beside a stand-in, judged by nothing: "
        f"compiled steps beside the eager step {_errors(compiled, table) or 'none'}, models of remote code beside a "
        f"native look-alike {_errors(alike, table) or 'none'}; refused among them: "
        f"{_reasons([receipt for receipt in rows if table[receipt.id].error_percent is None], table)}."
    )


def _verdicts() -> str:
    cases, rows = verdict_table.read_cases(), verdict_table.read_table().values()
    counts = Counter(row.outcome for row in rows)
    ran = len(rows) - counts["refused"]
    return (
        f"Of {len(cases)} reported cases that fitted or ran out of memory {ran} were run, {counts['refused']} are "
        f"refused and {len(cases) - len(rows)} were not run yet. Of those run {counts['right']} are predicted right, "
        f"{counts['near']} wrong by less than 5 % of the GPU's capacity, {counts['wrong']} wrong; "
        "`tests/agreement/verdict_table.tsv` has each with its mechanism."
    )


def with_accuracy(readme: str) -> str:
    """README with the section between its marks."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + accuracy() + END + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(with_accuracy(README.read_text(encoding="utf-8")), encoding="utf-8")
