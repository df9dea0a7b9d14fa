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
    refused = {}
    for receipt in RECEIPTS:
        try:
            options_of_receipt(receipt)
        except Refused as error:
            refused[receipt.id] = str(error)
    assert refused == {name: row.note for name, row in TABLE.items() if row.error_percent is None and name in refused}


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
        assert abs(error) <= abs(row.error_percent) + SLACK_PERCENT, f"{name}: {error:+.4f}, was {row.error_percent:+}"
