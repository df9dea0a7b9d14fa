"""LoRA as `LoRA.prepare` makes it, against the same PEFT model trained for real on the CPU: live bytes, to the byte."""

import functools
from dataclasses import dataclass

import peft
import pytest
import torch
import transformers as hf

from metapeak.strategies import CheckpointEveryBlock, FrozenBase, GradientCheckpointing, LoRA
from metapeak.strategies.checkpoint_policies import parse_policy
from metapeak.strategies.gradient_checkpointing import CheckpointModules
from metapeak.strategies.recompute import checkpointed
from metapeak.strategies.regions import regions_of
from metapeak.tracer.capture import record_training_step
from tests.agreement.cpu_oracle import run_on_cpu
from tests.agreement.families import FAMILIES, Family
from tests.agreement.test_checkpointing import timeline

_BY_NAME = {family.name: family for family in FAMILIES}
_TEXT = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
LLAMA, GPT2, MIXTRAL = _BY_NAME["llama"], _BY_NAME["gpt2"], _BY_NAME["mixtral, all experts"]
PHI3 = Family("phi3", hf.Phi3ForCausalLM, lambda: hf.Phi3Config(**_TEXT, pad_token_id=0))
BERT_HEAD = Family(
    "bert classifier",
    hf.BertForSequenceClassification,
    lambda: hf.BertConfig(
        **{key: value for key, value in _TEXT.items() if key != "num_key_value_heads"},
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    ),
)


def big_vocabulary(tied):
    config = functools.partial(hf.LlamaConfig, **{**_TEXT, "vocab_size": 128_256}, tie_word_embeddings=tied)
    return Family(f"llama, 128k vocabulary, {'tied' if tied else 'untied'}", hf.LlamaForCausalLM, config)


@dataclass
class Case:
    """One LoRA: our options, and the LoraConfig that a script would write for it."""

    family: Family
    ours: dict
    peft: dict
    dtype: torch.dtype = torch.float32
    autocast_adapter_dtype: bool = True
    task: str | None = "CAUSAL_LM"

    def build(self, device):
        return self.family.build(device).to(self.dtype)

    def batch(self):
        batch = self.family.batch()
        if self.family is BERT_HEAD:
            batch["labels"] = torch.zeros(2, dtype=torch.int64)
        return batch

    def ours_on(self, device="meta"):
        return LoRA(**self.ours).prepare(self.build(device))

    def real(self, device="cpu"):
        config = peft.LoraConfig(**self.peft, task_type=self.task)
        return peft.get_peft_model(self.build(device), config, autocast_adapter_dtype=self.autocast_adapter_dtype)


QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
CASES = {
    "llama, default targets": Case(LLAMA, {}, {"r": 16}),
    "llama, all-linear, r4": Case(
        LLAMA, {"rank": 4, "targets": "all-linear"}, {"r": 4, "target_modules": "all-linear"}
    ),
    "llama, bf16 base, fp32 adapters": Case(
        LLAMA, {"rank": 4, "targets": QKVO}, {"r": 4, "target_modules": list(QKVO)}, dtype=torch.bfloat16
    ),
    "llama, bf16 base, bf16 adapters": Case(
        LLAMA,
        {"rank": 4, "adapter_dtype": "weights"},
        {"r": 4},
        dtype=torch.bfloat16,
        autocast_adapter_dtype=False,
    ),
    "llama, DoRA, bf16 base, bf16 adapters": Case(
        LLAMA,
        {"rank": 4, "dora": True, "adapter_dtype": "weights"},
        {"r": 4, "use_dora": True},
        dtype=torch.bfloat16,
        autocast_adapter_dtype=False,
    ),
    "llama, fp64 base": Case(LLAMA, {"rank": 4}, {"r": 4}, dtype=torch.float64),
    "llama, regular expression": Case(
        LLAMA,
        {"rank": 4, "targets": r".*layers\.1\..*(up|down)_proj"},
        {"r": 4, "target_modules": r".*layers\.1\..*(up|down)_proj"},
    ),
    "llama, layer 0, rank pattern": Case(
        LLAMA,
        {"rank": 4, "layers": (0,), "rank_pattern": {"q_proj": 2}},
        {"r": 4, "layers_to_transform": [0], "rank_pattern": {"q_proj": 2}},
    ),
    "llama, DoRA": Case(LLAMA, {"rank": 4, "dora": True}, {"r": 4, "use_dora": True}),
    "llama, DoRA, bf16 base": Case(LLAMA, {"rank": 4, "dora": True}, {"r": 4, "use_dora": True}, dtype=torch.bfloat16),
    "llama, rsLoRA, alpha 32": Case(
        LLAMA, {"rank": 4, "rslora": True, "alpha": 32}, {"r": 4, "use_rslora": True, "lora_alpha": 32}
    ),
    "gpt2, fused c_attn": Case(GPT2, {"rank": 4}, {"r": 4, "fan_in_fan_out": True}),
    "gpt2, all-linear, every bias": Case(
        GPT2,
        {"rank": 4, "targets": "all-linear", "bias": "all"},
        {"r": 4, "target_modules": "all-linear", "bias": "all", "fan_in_fan_out": True},
    ),
    "gpt2, DoRA, biases of adapted layers": Case(
        GPT2,
        {"rank": 4, "dora": True, "bias": "lora_only"},
        {"r": 4, "use_dora": True, "bias": "lora_only", "fan_in_fan_out": True},
    ),
    "phi3, fused qkv_proj and gate_up_proj": Case(
        PHI3,
        {"rank": 4, "targets": ("qkv_proj", "gate_up_proj")},
        {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj"]},
    ),
    "bert, classifier saved by PEFT": Case(BERT_HEAD, {"rank": 4}, {"r": 4}, task="SEQ_CLS"),
    "t5": Case(_BY_NAME["t5"], {"rank": 4}, {"r": 4}, task="SEQ_2_SEQ_LM"),
    "vit, no task class": Case(
        _BY_NAME["vit"], {"rank": 4, "targets": "all-linear"}, {"r": 4, "target_modules": "all-linear"}, task=None
    ),
    "mamba": Case(_BY_NAME["mamba"], {"rank": 4, "targets": ("in_proj",)}, {"r": 4, "target_modules": ["in_proj"]}),
    "llama, 128k vocabulary, untied, embeddings and head saved": Case(
        big_vocabulary(tied=False),
        {"rank": 4, "modules_to_save": ("embed_tokens", "lm_head")},
        {"r": 4, "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "llama, 128k vocabulary, tied, embeddings and head saved": Case(
        big_vocabulary(tied=True),
        {"rank": 4, "modules_to_save": ("embed_tokens", "lm_head")},
        {"r": 4, "modules_to_save": ["embed_tokens", "lm_head"]},
        dtype=torch.bfloat16,
    ),
    "llama, adapters on the embedding": Case(
        LLAMA, {"rank": 4, "targets": ("embed_tokens",)}, {"r": 4, "target_modules": ["embed_tokens"]}
    ),
    "mixtral, fused experts": Case(
        MIXTRAL,
        {"rank": 2, "targets": (), "target_parameters": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")},
        {"r": 2, "target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "mixtral, experts without a word on targets, bf16": Case(
        MIXTRAL,
        {"rank": 2, "target_parameters": ("mlp.experts.down_proj",), "adapter_dtype": "weights"},
        {"r": 2, "target_parameters": ["mlp.experts.down_proj"]},
        dtype=torch.bfloat16,
        autocast_adapter_dtype=False,
    ),
    "mixtral, experts and attention": Case(
        MIXTRAL,
        {"rank": 2, "targets": ("q_proj",), "target_parameters": ("mlp.experts.down_proj",)},
        {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    ),
}
SLOW = {
    "llama, fp64 base",
    "llama, regular expression",
    "llama, layer 0, rank pattern",
    "llama, rsLoRA, alpha 32",
    "llama, DoRA, bf16 base",
    "gpt2, DoRA, biases of adapted layers",
    "t5",
    "vit, no task class",
    "mamba",
    "mixtral, experts and attention",
}
by_case = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, case in CASES.items()],
)
CHECKPOINTED = ("llama, default targets", "llama, bf16 base, fp32 adapters", "gpt2, fused c_attn", "llama, DoRA")
by_checkpointed = pytest.mark.parametrize("name", CHECKPOINTED)


def adamw(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


def facts(model):
    return {
        name: (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }


@by_case
def test_the_module_is_peft_s(case):
    ours, real = case.ours_on(), case.real()
    assert type(ours) is type(real)
    assert facts(ours) == facts(real)
    assert {parameter.device.type for parameter in ours.parameters()} == {"meta"}


@by_case
def test_live_bytes_equal_a_real_cpu_run(case):
    cpu = run_on_cpu(case.real(), case.batch(), adamw)
    graph, _ = record_training_step(case.ours_on(), case.batch(), adamw)
    phases = {(phase.iteration, phase.phase): phase for phase in graph.liveness().phases() if phase.iteration}
    assert {key: phase.end_bytes for key, phase in phases.items()} == cpu.ends
    assert {key: phase.peak_bytes for key, phase in phases.items()} == {key: cpu.peak(key) for key in phases}


def test_preparing_draws_no_random_number():
    case = CASES["llama, all-linear, r4"]
    model, before = case.build("meta"), torch.random.get_rng_state()
    LoRA(**case.ours).prepare(model)
    assert torch.equal(before, torch.random.get_rng_state())


@by_checkpointed
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_full_equals_a_real_cpu_run(name, use_reentrant):
    """The frozen embedding's output requires gradients, is kept, and gets a gradient of its own."""
    case = CASES[name]
    real = case.real()
    real.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    real.enable_input_require_grads()
    cpu = run_on_cpu(real, case.batch(), adamw)
    ours = CheckpointEveryBlock(use_reentrant=use_reentrant).prepare(case.ours_on())
    graph, _ = record_training_step(ours, case.batch(), adamw)
    phases = {(phase.iteration, phase.phase): phase for phase in graph.liveness().phases() if phase.iteration}
    assert {key: phase.end_bytes for key, phase in phases.items()} == cpu.ends
    assert {key: phase.peak_bytes for key, phase in phases.items()} == {key: cpu.peak(key) for key in phases}


@functools.cache
def trace(name):
    model = GradientCheckpointing().prepare(CASES[name].ours_on())
    return record_training_step(model, CASES[name].batch(), adamw, decouple_saves=True)[0]


def retrace(name, plan):
    model = CheckpointModules(plan=plan).prepare(CASES[name].ours_on())
    return record_training_step(model, CASES[name].batch(), adamw)[0].liveness()


@by_checkpointed
def test_the_rewrite_equals_the_switch(name):
    graph = trace(name)
    model = CheckpointEveryBlock().prepare(CASES[name].ours_on())
    switched, _ = record_training_step(model, CASES[name].batch(), adamw)
    rewritten = checkpointed(graph, regions_of(graph, parse_policy("full").modules(graph)))
    assert timeline(rewritten) == timeline(switched.liveness())


@by_checkpointed
@pytest.mark.parametrize("policy", ["every:2", "modules:*mlp,*attn", "modules:*.q_proj,*.c_attn", "nested:*mlp"])
def test_the_rewrite_equals_the_retrace(name, policy):
    graph = trace(name)
    names = parse_policy(policy).modules(graph)
    plan = {"checkpointed": names}
    assert timeline(checkpointed(graph, regions_of(graph, names))) == timeline(retrace(name, plan))


@by_checkpointed
def test_reentrant_checkpoints(name):
    graph = trace(name)
    names = parse_policy("full").modules(graph)
    rewritten = checkpointed(graph, regions_of(graph, names, reentrant=True))
    assert timeline(rewritten) == timeline(retrace(name, {"checkpointed": names, "use_reentrant": True}))


FROZEN = {
    "norms": (LLAMA, ("input_layernorm", "post_attention_layernorm", "norm"), "norm"),
    "head": (GPT2, ("lm_head",), "wte"),  # tied to the embedding
    "last block": (LLAMA, ("layers.1",), "layers.1."),
}


@pytest.mark.parametrize("family, trainable, part", FROZEN.values(), ids=FROZEN.keys())
def test_a_frozen_base_equals_a_real_cpu_run(family, trainable, part):
    real = family.build("cpu")
    for name, parameter in real.named_parameters():
        parameter.requires_grad_(part in name)
    cpu = run_on_cpu(real, family.batch(), adamw)
    graph, _ = record_training_step(
        FrozenBase(trainable=trainable).prepare(family.build("meta")), family.batch(), adamw
    )
    phases = {(phase.iteration, phase.phase): phase for phase in graph.liveness().phases() if phase.iteration}
    assert {key: phase.end_bytes for key, phase in phases.items()} == cpu.ends
    assert {key: phase.peak_bytes for key, phase in phases.items()} == {key: cpu.peak(key) for key in phases}
