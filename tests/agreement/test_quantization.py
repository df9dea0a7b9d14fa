"""QLoRA on the phantom GPU beside the same with the real bitsandbytes and PEFT on the CPU: bytes alive at phase ends.

Inside its operators bitsandbytes' CPU kernels make other temporaries than its CUDA kernels, and no dispatch mode sees
them; what outlives a phase is the same on both.
"""

import copy
import warnings

import peft
import pytest
import torch
import transformers
from tests.agreement.cpu_oracle import run_on_cpu

from metapeak.strategies.quantization import Quantization
from metapeak.strategies.quantization.peft_door import quantised_bases
from metapeak.tracer.capture import record_training_step

LLAMA = transformers.LlamaConfig(
    num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=131, use_cache=False, attention_bias=True, attn_implementation="eager",
)  # fmt: skip
PHI3 = transformers.Phi3Config(
    num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=131, use_cache=False, pad_token_id=0, attn_implementation="eager",
)  # fmt: skip
GPT2 = transformers.GPT2Config(
    n_layer=2, n_embd=64, n_head=2, vocab_size=131, use_cache=False, attn_implementation="eager", resid_pdrop=0.0,
    embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
CONFIGS = {"llama": LLAMA, "phi3": PHI3, "gpt2": GPT2}
SCHEMES = {
    "nf4": {"scheme": "nf4"},
    "nf4 double": {"scheme": "nf4", "double_quant": True},
    "nf4 computed in float32": {"scheme": "nf4", "compute_dtype": "fp32"},
    "nf4 k-bit": {"scheme": "nf4", "double_quant": True, "kbit_prepare": True},
    "int8": {"scheme": "int8"},
    "int8 k-bit": {"scheme": "int8", "kbit_prepare": True},
}
ADAPTERS = {
    "lora": {"target_modules": "all-linear"},
    "dora": {"target_modules": "all-linear", "use_dora": True},
}


def build(config, device):
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.bfloat16).train()


def batch_of():
    ids = torch.arange(2 * 24).view(2, 24) % 131
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


def quantised_by_bitsandbytes(config, scheme, double_quant=False, compute_dtype="bf16", kbit_prepare=False):
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    bits = transformers.BitsAndBytesConfig(
        load_in_4bit=scheme == "nf4", load_in_8bit=scheme == "int8", bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[compute_dtype],
    )  # fmt: skip
    model = build(config, "cpu")
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), bits)
    import bitsandbytes as bnb

    for name, part in list(model.named_modules()):
        if isinstance(part, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
            weight = weights[f"{name}.weight"]
            weight = weight.t().contiguous() if "Conv1D" in part.source_cls.__name__ else weight
            options = {key: value for key, value in part.weight.__dict__.items() if not key.startswith("_")}
            part.weight = type(part.weight)(weight, **{**options, "requires_grad": False}).to("cpu")
            if part.bias is not None:
                part.bias = torch.nn.Parameter(weights[f"{name}.bias"], requires_grad=False)
    model.is_quantized = True
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = scheme == "nf4", scheme == "int8"
    if kbit_prepare:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        model.enable_input_require_grads()
    return model


def with_adapters(model, adapters):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **adapters))


def cpu_ends(model):
    """Bytes alive at phase ends beyond those that were loaded."""
    run = run_on_cpu(model, batch_of(), make_optimizer)
    loaded = {id(item.untyped_storage()): item for item in [*model.parameters(), *model.buffers()]}
    return run.ends, loaded


def phantom_ends(model):
    graph, _ = record_training_step(model, batch_of(), make_optimizer)
    liveness = graph.liveness()
    phases = {(phase.iteration, str(phase.phase)): phase.end_bytes for phase in liveness.phases()}
    start = phases.pop((0, "load"))
    return {phase: end - start for phase, end in phases.items()}


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", CONFIGS)
def test_what_outlives_a_phase_is_what_bitsandbytes_keeps(family, scheme, adapters, monkeypatch):
    pytest.importorskip("bitsandbytes")
    import bitsandbytes.autograd._functions as functions

    # On the CPU training takes another function than on CUDA; CUDA's runs there, too.
    monkeypatch.setattr(functions, "MatMul8bitFp", functions.MatMul8bitLt)
    real = with_adapters(quantised_by_bitsandbytes(CONFIGS[family], **SCHEMES[scheme]), ADAPTERS[adapters])
    with quantised_bases():
        ours = with_adapters(
            Quantization(**SCHEMES[scheme]).prepare(build(CONFIGS[family], "meta")), ADAPTERS[adapters]
        )
    names = [(name, type(part).__name__) for name, part in real.named_modules()]
    assert [(name, type(part).__name__) for name, part in ours.named_modules()] == names
    loaded = sum(item.untyped_storage().nbytes() for item in {*real.parameters(), *real.buffers()})
    run = run_on_cpu(real, batch_of(), make_optimizer)
    batch = sum(item.nbytes for item in batch_of().values())
    expected = {phase: end - loaded - batch for phase, end in run.ends.items()}
    assert phantom_ends(ours) == expected
