"""A long pipeline played over a short run equals the real schedule, run whole: every action, every total."""

import json
from unittest import mock

import pytest

from metapeak.strategies import simulate_options
from metapeak.strategies.parallel import pipeline_traces

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 130,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
CASES = {
    "1f1b": {"pp": 4, "microbatches": 6},
    "interleaved": {"pp": 4, "schedule": "interleaved-1f1b:2", "microbatches": 8},
    "gpipe": {"pp": 2, "schedule": "gpipe", "microbatches": 7},
    "looped-bfs": {"pp": 4, "schedule": "looped-bfs:2", "microbatches": 9},
    "zero bubble": {"pp": 4, "schedule": "interleaved-zero-bubble:2", "microbatches": 8},
    "zbv": {"pp": 4, "schedule": "zbv", "microbatches": 12},
    "uneven": {"pp": 4, "pp_split": "1,4,6", "microbatches": 8},
    "1f1b, sharded unevenly": {"pp": 4, "dp_shard": 3, "microbatches": 6},
    "interleaved, sharded": {"pp": 4, "dp_shard": 2, "schedule": "interleaved-1f1b:2", "microbatches": 10},
    "checkpointing, bf16": {"pp": 4, "microbatches": 8, "checkpointing": "full", "precision": "bf16"},
    "autocast": {"pp": 4, "microbatches": 8, "schedule": "interleaved-1f1b:2", "precision": "bf16-mixed"},
    "megatron": {"pp": 4, "schedule": "megatron-1f1b", "microbatches": 7},
    "megatron interleaved": {"pp": 4, "schedule": "megatron-interleaved:2", "microbatches": 12},
    "tp": {"pp": 4, "tp": 2, "microbatches": 7},
    "tp, sequence": {"pp": 4, "tp": 2, "microbatches": 7, "sequence_parallel": True, "loss_parallel": True},
    "lora": {"pp": 4, "microbatches": 7, "method": "lora"},
}
_DEFAULT = ("1f1b", "interleaved")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def check(tiny, name):
    options = {"seq_len": 16, **CASES[name]}
    with mock.patch.object(pipeline_traces, "play", wraps=pipeline_traces.play) as play:
        played = simulate_options(tiny, options)
    assert play.call_count == len(played.ranks)
    with mock.patch.object(pipeline_traces, "short_run", lambda *given: None):
        whole = simulate_options(tiny, options)
    assert [text for text in played.how.assumptions if text != pipeline_traces.BUFFER_KEPT] == [*whole.how.assumptions]
    if name == "interleaved, sharded":
        assert pipeline_traces.BUFFER_KEPT in played.how.assumptions
        check_but_for_a_buffer(played, whole)
        return
    for ours, theirs in zip(played.ranks, whole.ranks, strict=True):
        assert ours.actions == theirs.actions
        assert ours.breakdown == theirs.breakdown
        assert ours.phases == theirs.phases
        assert ours.not_shared == theirs.not_shared
        assert ours.steady_bytes == theirs.steady_bytes
        assert ours.requested_bytes == theirs.requested_bytes
        assert ours.peak_at.module == theirs.peak_at.module and ours.peak_at.op == theirs.peak_at.op


def check_but_for_a_buffer(played, whole):
    """What BUFFER_KEPT says: the same bytes after every action, peaks that are one unit's all-gather higher at most."""
    block = 4 * (2 * 48 * 48 + 2 * 24 * 48 + 3 * 100 * 48 + 2 * 48)
    for ours, theirs in zip(played.ranks, whole.ranks, strict=True):
        assert [one.end_bytes for one in ours.actions] == [one.end_bytes for one in theirs.actions]
        assert ours.steady_bytes == theirs.steady_bytes
        assert 0 <= ours.requested_bytes - theirs.requested_bytes <= block
        differing = [one for one, other in zip(ours.actions, theirs.actions) if one != other]
        assert {one.kind for one in differing} <= {"F"} and len(differing) <= 4


@pytest.mark.parametrize("name", _DEFAULT)
def test_played_equals_run_whole(tiny, name):
    check(tiny, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in _DEFAULT])
def test_played_equals_run_whole_for_every_schedule(tiny, name):
    check(tiny, name)
