"""LoRA and frozen bases: what they refuse, what they say, and how they compare."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw

from metapeak.strategies import CheckpointEveryBlock, FrozenBase, LoRA, simulate
from metapeak.strategies.checkpoint_study import study_checkpointing, verify
from metapeak.tracer import StepSpec
from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.liveness import Category

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "dtype": "bfloat16",
}
STEP = StepSpec(batch_size=2, seq_len=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    (path / "config.json").write_text(json.dumps(LLAMA))
    return str(path)


def states(result):
    """Bytes of optimizer states at the end."""
    liveness = result.worst.liveness
    last = liveness.num_ops - 1
    alive = (liveness.birth <= last) & (last < liveness.death)
    return int(liveness.nbytes[alive & (liveness.category == Category.OPTIMIZER_STATE)].sum())


@settings(max_examples=5, derandomize=True, deadline=None)
@given(
    rank=draw.integers(1, 24),
    targets=draw.sampled_from([None, "all-linear", ("q_proj",), ("gate_proj", "down_proj")]),
    dora=draw.booleans(),
)
def test_states_are_the_adapters_alone(folder, rank, targets, dora):
    lora = simulate(folder, STEP, [LoRA(rank=rank, targets=targets, dora=dora)])
    full = simulate(folder, STEP)
    assert lora.model.trainable_parameters < full.model.trainable_parameters
    assert states(lora) == 2 * 4 * lora.model.trainable_parameters  # two fp32 moments
    assert states(lora) < 2 * states(full)  # of bf16 moments
    assert lora.model.parameters == full.model.parameters + lora.model.trainable_parameters


def test_the_report_says_what_is_trained(folder):
    result = simulate(folder, STEP, [LoRA(rank=80), CheckpointEveryBlock()])
    assert result.model.architecture == "LlamaForCausalLM"
    assert result.options["lora_targets"].value == ("q_proj", "v_proj")
    assert result.options["lora_targets"].origin == "PEFT's default for llama"
    said = " ".join(result.how.assumptions)
    assert "adapter parameters in float32" in said and "the base is frozen" in said
    assert "lora rank 80 is above the smaller side of 4 layers (the smallest is 64 x 32)" in said


def test_a_target_that_is_nowhere_is_named(folder):
    result = simulate(folder, STEP, [LoRA(targets=("q_proj", "c_attn"), modules_to_save=("lm_head",))])
    said = " ".join(result.how.assumptions)
    assert "lora targets c_attn match no layer" in said
    assert "lm_head is trained whole: PEFT keeps a copy of 8,192 parameters in bfloat16" in said


@pytest.mark.parametrize(
    "strategy, message",
    [
        (lambda: LoRA(targets=("foo",)), r"match no layer. Linear layers: q_proj \(2\), .*lm_head \(1\)"),
        (lambda: LoRA(targets=".*foo"), "match no layer"),
        (lambda: LoRA(modules_to_save=("foo",)), "no module is called 'foo'. Names that there are: embed_tokens"),
        (lambda: LoRA(target_parameters=("foo",)), "no parameter's path ends with 'foo'"),
        (lambda: LoRA(rank=0), "whole number from 1"),
        (lambda: LoRA(dropout=1.0), "probability"),
        (lambda: LoRA(targets=()), "targets is empty"),
        (lambda: LoRA(targets="(q_proj"), "no regular expression"),
        (lambda: FrozenBase(trainable=()), "needs `trainable`"),
        (lambda: FrozenBase(trainable=("lm_head", "foo")), "'foo' matches no module .* embed_tokens, q_proj"),
    ],
)
def test_what_is_refused(folder, strategy, message):
    with pytest.raises(InputError, match=message):
        simulate(folder, STEP, [strategy()])


def test_unknown_names():
    with pytest.raises(UnknownName, match="adapter dtype"):
        LoRA(adapter_dtype="int8")
    with pytest.raises(UnknownName, match="lora bias"):
        LoRA(bias="some")


def test_a_type_without_default_targets():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4, device="meta"))
    with pytest.raises(InputError, match=r"no default targets for Sequential.*all-linear.*Linear layers: 0 \(1\)"):
        LoRA().prepare(module)
    trained = LoRA(targets="all-linear", rank=2).prepare(module)
    with pytest.raises(InputError, match="has adapters already"):
        LoRA(targets="all-linear").prepare(trained)


def test_frozen_base(folder):
    result = simulate(folder, STEP, [FrozenBase(trainable=("norm", "*.layers.1.mlp.*"))])
    assert result.model.trainable_parameters == 64 + 3 * 64 * 128
    assert result.options["method"].value == "frozen-base"


def test_every_policy_of_a_study_equals_its_retrace(folder):
    """With flash attention, whose seeds are scalars that the offload policy carries to the host and back."""
    step = StepSpec(batch_size=2, seq_len=32)
    study = study_checkpointing(folder, step, strategies=[LoRA()])
    for result in study.policies:
        real = verify(result, folder, step, strategies=[LoRA()])
        assert (result.policy, result.rank.requested_bytes) == (result.policy, real.requested_bytes)
