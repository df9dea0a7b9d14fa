"""QLoRA on the phantom GPU beside the same with the real bitsandbytes and PEFT on the CPU: bytes alive at phase ends.

Inside its operators bitsandbytes' CPU kernels make other temporaries than its CUDA kernels, and no dispatch mode sees
them; what outlives a phase is the same on both.
"""

import copy
import itertools
import warnings

import peft
import pytest
import torch
import transformers

from metapeak.strategies.checkpoint_policies import parse_policy
from metapeak.strategies.gradient_checkpointing import CheckpointEveryBlock
from metapeak.strategies.quantization import Quantization
from metapeak.strategies.quantization.peft_door import quantised_bases
from metapeak.strategies.recompute import checkpointed
from metapeak.strategies.regions import regions_of
from metapeak.tracer.capture import record_training_step
from metapeak.tracer.liveness import Phase
from tests.agreement.cpu_oracle import run_on_cpu

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
# The CPU keeps LayerNorm's statistics in the dtype of its input, CUDA in float32: the same for float32 alone.
DTYPES = {"gpt2": torch.float32}
QUICK = {
    ("llama", "nf4 double", "dora"),
    ("llama", "int8", "lora"),
    ("phi3", "nf4 k-bit", "lora"),
    ("gpt2", "nf4", "lora"),
}
# PEFT's DoRA forgets int8 scales when the layer is on the CPU (utils/integrations.py, `is_cpu`).
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(CONFIGS, SCHEMES, ADAPTERS)
    if not (case[1].startswith("int8") and case[2] == "dora")
]


def build(family, device):
    config, dtype = copy.deepcopy(CONFIGS[family]), DTYPES.get(family, torch.bfloat16)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def batch_of():
    ids = torch.arange(2 * 24).view(2, 24) % 131
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


def quantised_by_bitsandbytes(family, scheme, double_quant=False, compute_dtype="bf16", kbit_prepare=False):
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    bits = transformers.BitsAndBytesConfig(
        load_in_4bit=scheme == "nf4", load_in_8bit=scheme == "int8", bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[compute_dtype],
    )  # fmt: skip
    model = build(family, "cpu")
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


def statistics_of(model):
    """The tensors that real quantised layers hold beside their parameters."""
    for part in model.modules():
        state = getattr(getattr(part, "weight", None), "quant_state", None)
        if state is not None:
            yield from (state.absmax, state.code)
            yield from (state.offset, state.state2.absmax, state.state2.code) if state.nested else ()
        elif getattr(getattr(part, "weight", None), "SCB", None) is not None:
            yield part.weight.SCB


def phantom_ends(model):
    graph, _ = record_training_step(model, batch_of(), make_optimizer)
    liveness = graph.liveness()
    phases = {(phase.iteration, str(phase.phase)): phase.end_bytes for phase in liveness.phases()}
    start = phases.pop((0, "load"))
    return {phase: end - start for phase, end in phases.items()}


@pytest.mark.parametrize("family, scheme, adapters", CASES)
def test_what_outlives_a_phase_is_what_bitsandbytes_keeps(family, scheme, adapters, monkeypatch):
    pytest.importorskip("bitsandbytes")
    import bitsandbytes.autograd._functions as functions

    # On the CPU training takes another function than on CUDA; CUDA's runs there, too.
    monkeypatch.setattr(functions, "MatMul8bitFp", functions.MatMul8bitLt)
    options = {"compute_dtype": "bf16", **SCHEMES[scheme]} if scheme.startswith("nf4") else SCHEMES[scheme]
    real = with_adapters(quantised_by_bitsandbytes(family, **options), ADAPTERS[adapters])
    with quantised_bases():
        ours = with_adapters(Quantization(**options).prepare(build(family, "meta")), ADAPTERS[adapters])
    names = [(name, type(part).__name__) for name, part in real.named_modules()]
    assert [(name, type(part).__name__) for name, part in ours.named_modules()] == names
    statistics = list(statistics_of(real))
    before = [*real.parameters(), *real.buffers(), *batch_of().values(), *statistics]
    loaded = sum({item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in before}.values())
    run = run_on_cpu(real, batch_of(), make_optimizer, also=statistics)
    assert phantom_ends(ours) == {phase: end - loaded for phase, end in run.ends.items()}


def adapted(scheme):
    model = Quantization(**SCHEMES[scheme]).prepare(build("llama", "meta"))
    model.enable_input_require_grads()
    with quantised_bases():
        return with_adapters(model, ADAPTERS["lora"])


def timeline(liveness):
    """(operation, live bytes) without detach, a view that saving and unpacking add in either way."""
    live = liveness.live_bytes()
    return [
        (liveness.op_names[liveness.op[index]], int(live[index]))
        for index in range(liveness.num_ops)
        if liveness.op_phase[index] != Phase.LOAD and "detach" not in liveness.op_names[liveness.op[index]]
    ]


@pytest.mark.parametrize("scheme", ["nf4 double", "int8"])
def test_checkpoints_on_a_quantised_base_equal_the_retrace(scheme):
    """int8 keeps its input on the autograd context, where no checkpoint sees it: it stays in both."""
    graph, _ = record_training_step(adapted(scheme), batch_of(), make_optimizer, decouple_saves=True)
    policy = CheckpointEveryBlock()
    model = adapted(scheme)
    policy.prepare(model)
    switched, _ = record_training_step(model, batch_of(), make_optimizer)
    rewritten = checkpointed(graph, regions_of(graph, parse_policy("full").modules(graph)))
    assert timeline(rewritten) == timeline(switched.liveness())
