"""Out-of-memory messages that people published, with the tensor that failed: it is among the first three candidates.

oom/cases.json: each with its source, in the order of the receipts that name the tensor. Those that need sharding or
packages that are not modelled say what they need and are not counted.
"""

import json
from pathlib import Path

import pytest

from metapeak.strategies.explain_oom import explain_oom
from metapeak.strategies.request import simulate_resolved
from metapeak.strategies.settings import options_of, resolve
from metapeak.tracer.device.oom_message import read_oom_message

CASES = json.loads((Path(__file__).parent / "oom" / "cases.json").read_text(encoding="utf-8"))
RUN_HERE = [case for case in CASES if "needs" not in case]
QUICK = "A49-grpo-qwen3-06b-20k-1"
FIRST = 3


def is_the_one(candidate, tensor):
    """Whether a candidate is the tensor that the source names."""
    nbytes = candidate.tensor.nbytes
    if "bytes" in tensor and nbytes != tensor["bytes"]:
        return False
    if "bytes_between" in tensor and not tensor["bytes_between"][0] <= nbytes <= tensor["bytes_between"][1]:
        return False
    if "tokens" in tensor:
        least, most = tensor["tokens"]
        size = tensor["bytes_per_token"] * candidate.tensor.shape[-2]
        return nbytes == size and candidate.tokens is not None and least <= candidate.tokens <= most
    return candidate.instant.phase == tensor.get("phase", candidate.instant.phase)


def found(case):
    """The place of the failing tensor among the candidates, from one; 0: it is not there."""
    simulation = simulate_resolved(case["model"], resolve(options_of(case["options"], "case")))
    explanation = explain_oom(read_oom_message(case["message"]), simulation)
    candidates = explanation.candidates or explanation.other_lengths
    places = [place for place, candidate in enumerate(candidates, 1) if is_the_one(candidate, case["tensor"])]
    return places[0] if places else 0


def test_every_case_names_its_source_and_its_message_can_be_read():
    for case in CASES:
        assert case["source"].startswith("github.com/") and case["tensor"]["is"]
        message = read_oom_message(case["message"])
        if "bytes" in case["tensor"]:
            rounded = -(-case["tensor"]["bytes"] // (2 << 20)) * (2 << 20)
            assert rounded in message.requested, case["id"]
        assert ("needs" in case) != ("options" in case)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case["id"], marks=[] if case["id"] == QUICK else [pytest.mark.slow]) for case in RUN_HERE],
)
def test_the_failing_tensor_is_among_the_first_three(case):
    assert 1 <= found(case) <= FIRST
