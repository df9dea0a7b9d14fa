"""Reported cases that fitted or ran out of memory against the predicted verdict, row by row of verdict_table.tsv.

A row fails when the verdict or the share of capacity is another than the table has, or when a miss has no mechanism.
`python -m tests.agreement.verdict_table [ID ...]` rewrites it; test_oom_cases.py compares the failing tensors.
"""

import pytest

from tests.agreement import verdict_table

CASES, TABLE = verdict_table.read_cases(), verdict_table.read_table()
QUICK = {"A60-t5large-fp16-worse-2"}


def test_the_table_is_of_these_cases():
    assert list(TABLE) == [name for name in CASES if name in TABLE]
    assert all(row.happened == CASES[name]["expect"]["verdict"] for name, row in TABLE.items())


def test_outcomes_follow_from_the_numbers_and_misses_have_a_mechanism():
    for name, row in TABLE.items():
        if row.share is None:
            assert row.outcome == row.predicted == "refused" and row.note, name
            continue
        assert row.outcome == verdict_table.outcome_of(row.happened, row.predicted, row.share), name
        assert row.outcome == "right" or len(row.note) > 20, name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in TABLE]
)
def test_the_verdict_is_that_of_the_table(name):
    row = verdict_table.judged(CASES[name])
    if "is not installed" in row.note:
        pytest.skip(row.note)
    assert (row.predicted, row.share) == (TABLE[name].predicted, TABLE[name].share)
