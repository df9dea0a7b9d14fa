"""`metapeak explain-oom` as a user meets it."""

import json

import pytest

from tests.reports.command_line import metapeak
from tests.reports.conftest import LLAMA

STEP = ("openai-community/gpt2", "--batch-size", "4", "--seq-len", "256", "--no-suggestions")
# float32 logits of 4 x 256 tokens: 205,852,672 bytes, whose segment has 198 MiB.
LOGITS = "CUDA out of memory. Tried to allocate 198.00 MiB"
HELD = (
    " (GPU 0; 7.93 GiB total capacity; {allocated} GiB already allocated; 10.00 MiB free; {reserved} GiB reserved in "
    "total by PyTorch)"
)


def explained(message, *more):
    done = metapeak("explain-oom", message, *STEP, *more, "--json", "-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_tensor_its_module_and_phase_are_named():
    record = explained(LOGITS)
    first = record["candidates"][0]
    assert first["bytes"] == 4 * 256 * 50257 * 4 and first["segment_bytes"] == 198 << 20
    assert {one["op_module"] for one in record["candidates"]} >= {"lm_head"}
    assert {one["phase"] for one in record["candidates"]} == {"forward", "backward"}
    assert record["other_lengths"] == [] and record["message"]["requested"]["low"] <= 198 << 20
    assert record["capacity_bytes"] is None and record["missing_bytes"] is None


def test_what_was_in_use_tells_forward_from_backward():
    """Of tensors of one size, the one before which the simulation holds what the message says comes first."""
    candidates = explained(LOGITS)["candidates"]
    assert len({one["allocated_before_bytes"] for one in candidates}) == len(candidates) > 2
    for wanted in (candidates[0], candidates[-1]):
        used = wanted["allocated_before_bytes"] / 2**30
        found = explained(LOGITS + HELD.format(allocated=f"{used:.2f}", reserved=f"{used + 0.3:.2f}"))
        best = found["candidates"][0]
        assert abs(best["allocated_before_bytes"] - wanted["allocated_before_bytes"]) < 0.01 * 2**30


def test_how_far_it_had_to_go():
    record = explained(LOGITS + HELD.format(allocated="1.00", reserved="1.20"))
    peak = record["peak"]
    assert record["missing_bytes"] == peak["reserved_bytes"] - record["capacity_bytes"] > 0
    assert record["predicted_failure"]["requested_bytes"] > 0
    for one in record["candidates"]:
        assert one["still_to_come_bytes"] == peak["allocated_bytes"] - one["allocated_before_bytes"] - one["bytes"]


def test_another_length_is_inferred():
    """A message from 384 tokens a sample while 256 were asked about: the logits say how many tokens there were."""
    record = explained("CUDA out of memory. Tried to allocate 296.00 MiB")
    assert record["candidates"] == []
    tokens = [one["tokens"] for one in record["other_lengths"] if one["shape"][-1] == 50257]
    # 4 x 384 tokens, as exactly as a segment of whole 2 MiB can say it
    assert tokens and all(abs(found - 4 * 384) < 2 * 2**20 / (50257 * 4) for found in tokens)


def test_the_text_names_all_of_it(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(f"step 1\n{LOGITS}{HELD.format(allocated='1.00', reserved='1.20')}\nbye\n")
    done = metapeak("explain-oom", str(log), *STEP)
    assert done.returncode == 0, done.stderr
    for words in (
        "The message: CUDA, segment of 198.0 MiB",
        "likeliest first",
        "lm_head",
        "How far it had to go",
        "fails",
    ):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("message", "words"),
    [("CUDA error: out of memory", "names no size"), ("everything is fine", "no out-of-memory message")],
)
def test_a_message_that_says_nothing_is_refused_before_anything_is_traced(message, words):
    done = metapeak("explain-oom", message, "nobody/nothing")
    assert (done.returncode, done.stdout) == (1, "") and words in done.stderr


def test_suggestions_are_for_the_gpu_of_the_message(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    message = "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 2.00 GiB total capacity; 1.10 GiB cached)"
    step = ("--batch-size", "64", "--seq-len", "4096")
    record = json.loads(metapeak("explain-oom", message, str(path), *step, "--json", "-").stdout)
    assert record["options"]["gpu_memory"]["from"] == "the message"
    assert record["suggestions"] and all(one["verdict"] == "fits" for one in record["suggestions"])
