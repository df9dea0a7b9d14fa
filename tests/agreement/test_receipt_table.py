"""Every published measurement against its prediction, row by row of receipt_table.tsv.

A row fails when the prediction is further off than the table says, when a miss has no named mechanism, or when a
receipt is refused for another reason than the table gives. A change that moves a prediction changes the table too:
see receipt_table.py. What follows from the table (README's, calibration.json) is compared with it here.
"""

import pytest

from metapeak.reports.calibration import calibration
from metapeak.reports.receipt_options import options_of_receipt
from metapeak.reports.receipts import Refused
from metapeak.reports.validation import PREDICTED_METRICS, Prediction
from metapeak.reports.validation_run import validate
from tests.agreement import accuracy_table, calibrate, receipt_table

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
    assert Prediction(receipt=receipt, predicted_bytes=predicted).within is not False or len(row.note) > 20


def test_refusals():
    """The table's refusals are today's, but for packages that were not installed where it was made."""
    refused = {}
    for receipt in (receipt for receipt in RECEIPTS if receipt.metric in PREDICTED_METRICS):
        try:
            options_of_receipt(receipt)
        except Refused as error:
            refused[receipt.id] = str(error)
    rows = {
        receipt.id: TABLE[receipt.id].note
        for receipt in RECEIPTS
        if receipt.metric in PREDICTED_METRICS
        and TABLE[receipt.id].error_percent is None
        and receipt.id not in REFUSED_BY_SIMULATE
        and "is not installed" not in TABLE[receipt.id].note
    }
    assert refused == rows


def test_what_follows_from_the_table_is_current():
    readme = accuracy_table.README.read_text(encoding="utf-8")
    assert readme == accuracy_table.with_accuracy(readme), "python -m tests.agreement.accuracy_table"
    assert calibration() == calibrate.calibration(), "python -m tests.agreement.calibrate"


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow])
        for name, receipts in STEPS.items()
        if any(TABLE[receipt.id].error_percent is not None for receipt in receipts)
    ],
)
def test_no_row_got_worse(step):
    for prediction in validate(STEPS[step]).predictions:
        name = prediction.receipt.id
        row = TABLE[name]
        if "is not installed" in (prediction.refused or ""):
            pytest.skip(prediction.refused)
        assert prediction.refused is None or row.error_percent is None, f"{name}: {prediction.refused}"
        if row.error_percent is None:
            continue
        error = prediction.error_percent
        # Signed: one that jumps to the other side is another mechanism, which wants a look and another line.
        assert abs(error - row.error_percent) <= SLACK_PERCENT, f"{name}: {error:+.4f}, was {row.error_percent:+}"
