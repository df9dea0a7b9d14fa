"""A spliced step equals that of the whole model, row by row: operations, arguments, births, deaths, saves, ticks."""

import json

import pytest

from metapeak.strategies import simulate, simulate_options
from metapeak.tracer import StepSpec
from metapeak.tracer.errors import InputError
from metapeak.tracer.models import list_models

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 14, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS = {
    "llama": LLAMA,
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_head": 2, "n_layer": 15,
             "vocab_size": 128},
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32, "intermediate_size": 64,
             "num_hidden_layers": 13, "num_attention_heads": 2, "vocab_size": 128},
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_ff": 64, "d_kv": 8,
           "num_heads": 4, "num_layers": 14, "num_decoder_layers": 16, "vocab_size": 128},
    "mixtral": {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
    "gemma3": {**LLAMA, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 8,
               "sliding_window": 16, "num_hidden_layers": 23, "sliding_window_pattern": 3},
    "deepseek": {**LLAMA, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 8,
                 "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
                 "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                 "first_k_dense_replace": 2, "num_hidden_layers": 15, "num_key_value_heads": 4},
    "wav2vec2": {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], "hidden_size": 32,
                 "intermediate_size": 64, "num_hidden_layers": 13, "num_attention_heads": 2, "conv_dim": [16] * 7,
                 "vocab_size": 32},
}  # fmt: skip
OPTIONS = {
    "amp": {"precision": "bf16-mixed", "max_grad_norm": 1.0, "grad_accum": 4},
    "for-loop": {"implementation": "for-loop"},
    "fused": {"implementation": "fused", "precision": "fp16-mixed"},
    "in-backward": {"implementation": "in-backward"},
    "8-bit": {"optimizer": "adamw8bit"},
    "adafactor": {"optimizer": "adafactor"},
    "lora": {"method": "lora", "checkpointing": "full"},
    "qlora": {"method": "qlora", "precision": "bf16"},
    "checkpointing": {"checkpointing": "full"},
    "fsdp2": {"dp_shard": 3, "precision": "bf16-mixed", "max_grad_norm": 1.0},
    "fsdp2-checkpointing": {"dp_shard": 2, "checkpointing": "full", "grad_accum": 4},
    "hsdp-tp": {"dp_shard": 2, "dp_replicate": 2, "tp": 2, "max_grad_norm": 1.0},
    "fsdp1": {"dp_shard": 2, "engine": "fsdp1"},
    "master": {"precision": "bf16", "master_weights": True, "grad_accum": 2, "grad_accum_dtype": "fp32"},
}


@pytest.fixture
def model(tmp_path):
    def write(name):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(CONFIGS[name]))
        return str(path)

    return write


def slow_but(names, *fast):
    return [pytest.param(name, marks=[] if name in fast else [pytest.mark.slow]) for name in names]


def is_spliced(simulation) -> bool:
    return any("are copies of a block" in sentence for sentence in simulation.how.assumptions)


def columns(graph):
    """Everything in a graph, with names in place of indices that depend on the order of first use."""

    def modules(column):
        return [graph.module_names[module] for module in column]

    named = {
        "op": [graph.op_names[op] for op in graph.op],
        "module": modules(graph.module),
        "owner": modules(graph.owner),
        "source": [graph.source_names[line] if line >= 0 else "" for line in graph.source],
        "value_dtype": [graph.dtype_names[dtype] for dtype in graph.value_dtype],
    }
    plain = {name: column for name, column in vars(graph).items() if name not in named and name != "saved"}
    plain = {name: column for name, column in plain.items() if name not in ("op_names", "source_names", "dtype_names")}
    saved = {}
    if graph.saved is not None:
        saved = {f"saved.{name}": column for name, column in vars(graph.saved).items() if name != "call_module"}
        saved.pop("saved.backward_of_sorted", None)
        saved["calls"] = modules(graph.saved.call_module)
    return {**named, **plain, **saved}


def check_equal(spliced, whole):
    assert is_spliced(spliced) and not is_spliced(whole)
    ours, theirs = columns(spliced.graph), columns(whole.graph)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    for rank, other in zip(spliced.ranks, whole.ranks, strict=True):
        assert rank.phases == other.phases
        assert (rank.device_bytes, rank.allocated_bytes) == (other.device_bytes, other.allocated_bytes)
        assert rank.steady_bytes == other.steady_bytes


@pytest.mark.parametrize("name", slow_but(CONFIGS, "llama", "t5", "gemma3", "deepseek", "wav2vec2"))
def test_a_spliced_step_is_that_of_the_whole_model(model, name):
    reference = model(name)
    spliced, whole = (simulate_options(reference, {"seq_len": 32, "full_trace": full}) for full in (False, True))
    check_equal(spliced, whole)


@pytest.mark.parametrize("title", slow_but(OPTIONS, "amp", "lora", "qlora", "checkpointing", "fsdp2", "hsdp-tp"))
def test_under_every_strategy(model, title):
    options = {"seq_len": 32, "batch_size": 2, **OPTIONS[title]}
    reference = model("llama")
    spliced, whole = (simulate_options(reference, {**options, "full_trace": full}) for full in (False, True))
    check_equal(spliced, whole)


@pytest.mark.parametrize("save", ["full", "sharded"])
def test_evaluation_generation_and_saving(model, save):
    options = {
        "seq_len": 32,
        "evaluate": True,
        "generate": 4,
        "save": save,
        "dp_shard": 2 if save == "sharded" else None,
    }
    reference = model("llama")
    spliced, whole = (simulate_options(reference, {**options, "full_trace": full}) for full in (False, True))
    check_equal(spliced, whole)
    assert {phase.phase for phase in spliced.worst.phases} >= {"evaluation", "generation", "save"}


def test_what_does_not_repeat_is_recorded_whole(model):
    # DDP's buckets hold the gradients of several blocks: none is like its neighbour.
    options = {"seq_len": 32, "dp_replicate": 2}
    given, whole = (simulate_options(model("llama"), {**options, "full_trace": full}) for full in (False, True))
    assert not is_spliced(given)
    assert given.worst.phases == whole.worst.phases


def test_a_model_that_takes_blocks_by_their_number_is_recorded_whole(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "layers_to_take": [2, 9]}))
    assert not is_spliced(simulate_options(str(path), {"seq_len": 32}))


def test_few_blocks_and_own_code_are_recorded_whole(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": 9}))
    assert not is_spliced(simulate_options(str(path), {"seq_len": 32}))
    script = tmp_path / "mine.py"
    script.write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"def build():\n    return LlamaForCausalLM(LlamaConfig(**{LLAMA!r}))\n"
    )
    assert not is_spliced(simulate_options(f"{script}:build", {"seq_len": 32, "task": "causal-lm"}))


@pytest.mark.slow
@pytest.mark.parametrize("name", [one.id for one in list_models()])
def test_every_model_of_the_catalogue(name):
    step = StepSpec(default_seq_len=512)
    try:
        spliced = simulate(name, step)
    except InputError as error:  # no loss, or packed weights
        pytest.skip(str(error))
    if not is_spliced(spliced):
        pytest.skip("recorded whole")
    check_equal(spliced, simulate(name, StepSpec(default_seq_len=512, full_trace=True)))
