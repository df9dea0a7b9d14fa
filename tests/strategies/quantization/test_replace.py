"""The layers that are quantised are those that the real library's loader replaces."""

import copy
import sys

import pytest
import torch
import transformers
from torch import nn

from metapeak.strategies.quantization import Quantization
from metapeak.strategies.quantization.replace import modules_left_out, quantized_layers
from metapeak.tracer.errors import InputError

CONFIGS = {
    "gpt2": transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=101, bos_token_id=0, eos_token_id=0),
    "llama": transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=2, vocab_size=101
    ),
    "tied llama": transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=2, vocab_size=101,
        tie_word_embeddings=True,
    ),
    "phi3": transformers.Phi3Config(
        num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=101, pad_token_id=0,
    ),
    "t5": transformers.T5Config(num_layers=1, d_model=32, d_kv=16, d_ff=48, num_heads=2, vocab_size=101),
    "mixtral": transformers.MixtralConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=2, vocab_size=101,
    ),
    "bert": transformers.BertConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=2, vocab_size=101
    ),
}  # fmt: skip
AUTO = {"t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModelForSequenceClassification}


def build(name):
    auto = AUTO.get(name, transformers.AutoModelForCausalLM)
    with torch.device("meta"):
        return auto.from_config(copy.deepcopy(CONFIGS[name]), dtype=torch.bfloat16)


@pytest.mark.parametrize("skip", [None, ("down_proj", "c_proj", "wo")], ids=["default", "named"])
@pytest.mark.parametrize("scheme", ["nf4", "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_layers_as_transformers_replaces(name, scheme, skip):
    bnb = pytest.importorskip("bitsandbytes")
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    real = build(name)
    config = transformers.BitsAndBytesConfig(load_in_4bit=scheme == "nf4", load_in_8bit=scheme == "int8")
    replace_with_bnb_linear(real, modules_left_out(real, skip), config)
    kind = bnb.nn.Linear4bit if scheme == "nf4" else bnb.nn.Linear8bitLt
    expected = {key: (part.in_features, part.out_features) for key, part in real.named_modules() if type(part) is kind}
    ours = quantized_layers(Quantization(scheme=scheme, skip_modules=skip).prepare(build(name)))
    assert {key: (part.in_features, part.out_features) for key, part in ours.items()} == expected
    assert expected


@pytest.mark.parametrize("name", CONFIGS)
def test_embeddings_heads_and_norms_stay(name):
    before = build(name)
    kept = {key for key, part in before.named_modules() if isinstance(part, nn.Embedding) or "norm" in key.lower()}
    head = before.get_output_embeddings()
    kept |= {key for key, part in before.named_modules() if part is head}
    module = Quantization(scheme="nf4").prepare(build(name))
    assert kept and not kept & quantized_layers(module).keys()
    tensors = dict(module.named_parameters(remove_duplicate=False))
    for key, parameter in before.named_parameters(remove_duplicate=False):
        if any(key.startswith(f"{place}.") for place in kept):
            assert (tensors[key].dtype, tensors[key].shape) == (parameter.dtype, parameter.shape)


def test_the_head_is_quantised_when_asked():
    module = Quantization(scheme="nf4", skip_modules=()).prepare(build("llama"))
    assert "lm_head" in quantized_layers(module)


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(InputError, match="has no linear layer that nf4 could quantise"):
        Quantization().prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))


def test_needs_no_bitsandbytes(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert quantized_layers(Quantization(double_quant=True).prepare(build("llama")))


def dtypes(module):
    return {name: parameter.dtype for name, parameter in module.named_parameters() if "norm" in name or "head" in name
            or "embed" in name}  # fmt: skip


def test_kbit_preparation_makes_norms_embeddings_and_head_float32():
    plain, prepared, back = (
        dtypes(Quantization(**options).prepare(build("llama")))
        for options in ({}, {"kbit_prepare": True}, {"kbit_prepare": True, "kbit_cast_back": True})
    )
    assert set(plain.values()) == {torch.bfloat16}
    assert set(prepared.values()) == {torch.float32}
    assert {name for name, dtype in back.items() if dtype is torch.bfloat16} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    with pytest.raises(InputError, match="kbit_cast_back undoes a part of kbit_prepare"):
        Quantization(kbit_cast_back=True)
