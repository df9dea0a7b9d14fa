"""PEFT's own layers for quantised bases are used, with the libraries installed and without."""

import subprocess
import sys

import peft
import pytest
import torch
import transformers
from torch import nn

from metapeak.strategies.lora import LoRA
from metapeak.strategies.quantization import Quantization

WITHOUT = """
import sys
sys.modules["bitsandbytes"] = sys.modules["gptqmodel"] = None  # as if not installed
import torch, transformers
{shim}
from metapeak.strategies.lora import LoRA
from metapeak.strategies.quantization import Quantization
config = transformers.LlamaConfig(
    num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=64
)
for scheme in ("nf4", "int8"):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = LoRA(targets=("q_proj",)).prepare(Quantization(scheme=scheme).prepare(model))
    part = model.base_model.model.model.layers[0].self_attn.q_proj
    print(type(part).__module__, type(part).__name__, sys.modules["bitsandbytes"])
import peft
with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(config)
print(type(LoRA(targets=("q_proj",)).prepare(model).base_model.model.model.layers[0].self_attn.q_proj).__module__)
"""


def tiny(**changes):
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, **changes,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)


@pytest.mark.parametrize(
    "scheme, expected",
    [
        ("nf4", "peft.tuners.lora.bnb.Linear4bit"),
        ("fp4", "peft.tuners.lora.bnb.Linear4bit"),
        ("int8", "peft.tuners.lora.bnb.Linear8bitLt"),
        ("gptq4", "peft.tuners.lora.gptq.GPTQLoraLinear"),
        ("awq4", "peft.tuners.lora.awq.AwqLoraLinear"),
    ],
)
def test_the_layer_that_peft_has_for_the_base(scheme, expected):
    groups = {"group_size": 64} if scheme in ("gptq4", "awq4") else {}
    base = Quantization(scheme=scheme, **groups).prepare(tiny())
    model = LoRA(targets=("q_proj", "down_proj")).prepare(base)
    layer = model.base_model.model.model.layers[0]
    for part in (layer.self_attn.q_proj, layer.mlp.down_proj):
        assert f"{type(part).__module__}.{type(part).__name__}" == expected
        assert part.lora_A["default"].weight.dtype == torch.float32
    assert layer.mlp.down_proj.lora_A["default"].weight.shape == (16, 128)


def test_everything_is_put_back():
    import peft.tuners.lora.bnb as lora_bnb
    import peft.tuners.lora.model as lora_model

    before = lora_bnb.bnb, lora_model.dispatch_gptq, lora_model.dispatch_awq, sys.modules.get("bitsandbytes")
    LoRA(targets=("q_proj",)).prepare(Quantization().prepare(tiny()))
    after = lora_bnb.bnb, lora_model.dispatch_gptq, lora_model.dispatch_awq, sys.modules.get("bitsandbytes")
    assert all(one is other for one, other in zip(before, after))


def test_without_the_libraries(pytestconfig):
    """In a process of its own, because PEFT asks once what is installed."""
    import metapeak

    shim = (
        f'import types; m = types.ModuleType("metapeak"); m.__path__ = {list(metapeak.__path__)!r}; '
        'sys.modules["metapeak"] = m'
    )
    run = subprocess.run([sys.executable, "-c", WITHOUT.format(shim=shim)], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        "peft.tuners.lora.bnb Linear4bit None",
        "peft.tuners.lora.bnb Linear8bitLt None",
        "peft.tuners.lora.layer",
    ]


def test_modules_to_save_are_not_quantised():
    model = LoRA(targets=("q_proj",), modules_to_save=("lm_head",)).prepare(Quantization().prepare(tiny()))
    saved = model.base_model.model.lm_head.modules_to_save["default"]
    assert type(saved) is nn.Linear and saved.weight.requires_grad and saved.weight.dtype == torch.float16
    assert isinstance(model, peft.PeftModel)
