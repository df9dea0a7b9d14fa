"""Every published measurement against its prediction, row by row of receipt_table.tsv.

A row fails when the prediction is further off than the table says, when a miss has no named mechanism, or when a
receipt is refused for another reason than the table gives. A change that moves a prediction changes the table too:
`python -m tests.agreement.receipt_table [ID ...]`.
"""

import pytest

from metapeak.reports.receipts import Refused, options_of_receipt
from metapeak.reports.validation import Prediction, validate
from tests.agreement import receipt_table

RECEIPTS = receipt_table.read()
TABLE = receipt_table.read_table()
STEPS = receipt_table.steps(RECEIPTS)
# Points that another version of torch or transformers may move an error by.
SLACK_PERCENT = 0.01
# Refused by options that only a run resolves; test_no_row_got_worse looks at the rest of their step.
REFUSED_BY_SIMULATE = {"fms-liger-L147-peak"}
# Run by default, some seconds each: LoRA; nf4 with autocast and a kept cache; full with fused kernels, an 8-bit
# optimizer with a GradScaler.
FAST = ("fms-main-L034", "fms-main-L070", "fms-liger-L002", "hf-bertlarge-all-adam8bit")


def test_the_table_has_every_receipt():
    assert list(TABLE) == [receipt.id for receipt in RECEIPTS]


@pytest.mark.parametrize("receipt", [receipt for receipt in RECEIPTS if TABLE[receipt.id].error_percent is not None])
def test_a_miss_has_a_mechanism(receipt):
    row = TABLE[receipt.id]
    measured = receipt.measured_bytes
    predicted = round(measured * (1 + row.error_percent / 100))
    assert Prediction(receipt=receipt, predicted_bytes=predicted).within or len(row.note) > 20


def test_refusals():
    """Rows and refusals are the same, but for packages that are installed here."""
    refused = {}
    for receipt in RECEIPTS:
        try:
            options_of_receipt(receipt)
        except Refused as error:
            refused[receipt.id] = str(error)
    rows = {name: row.note for name, row in TABLE.items() if row.error_percent is None}
    here = {name for name, note in rows.items() if "is not installed" in note and name not in refused}
    assert refused == {name: note for name, note in rows.items() if name not in here | REFUSED_BY_SIMULATE}


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow])
        for name, receipts in STEPS.items()
        if any(TABLE[receipt.id].error_percent is not None for receipt in receipts)
    ],
)
def test_no_row_got_worse(step):
    for prediction in validate(STEPS[step]):
        name = prediction.receipt.id
        row = TABLE[name]
        assert prediction.refused is None or row.error_percent is None, f"{name}: {prediction.refused}"
        if row.error_percent is None:
            continue
        error = prediction.error_percent
        # Signed: one that jumps to the other side is another mechanism, which wants a look and another line.
        assert abs(error - row.error_percent) <= SLACK_PERCENT, f"{name}: {error:+.4f}, was {row.error_percent:+}"
