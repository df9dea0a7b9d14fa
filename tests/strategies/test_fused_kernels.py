"""The option `kernels`: what fused kernels allocate, where they find no place, and that nothing stays patched.

Their oracle are the receipts with `kernels` in tests/agreement/receipt_table.tsv, to 0.1 %.
"""

import pytest
import torch
import transformers as hf
from transformers.models.llama import modeling_llama

from metapeak.strategies import simulate_options
from metapeak.strategies.checkpoint_policies import parse_policy
from metapeak.strategies.gradient_checkpointing import strategy_for
from metapeak.strategies.kernels import KERNELS, Kernels
from metapeak.strategies.lora import LoRA
from metapeak.strategies.loss import loss_strategy
from metapeak.strategies.quantization import Quantization
from metapeak.tracer.capture import record_training_step
from metapeak.tracer.errors import UnknownName
from metapeak.tracer.liveness import Category

ROWS, TOKENS, WORDS, HIDDEN, HEADS, KV_HEADS, LAYERS = 2, 64, 512, 32, 4, 2, 2


def llama(dtype=torch.bfloat16):
    config = hf.LlamaConfig(
        vocab_size=WORDS, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, intermediate_size=64, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return hf.LlamaForCausalLM(config).to(dtype).train()


def traced(*strategies, model=None, policy="none"):
    """The liveness of a step of SGD with momentum, and the module."""
    module = model if model is not None else llama()
    checkpointing = strategy_for(parse_policy(policy))
    for strategy in (*strategies, *([checkpointing] if checkpointing else [])):
        module = strategy.prepare(module)
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % 101
    batch = {"input_ids": ids, "labels": ids.clone()}
    graph, _ = record_training_step(module, batch, lambda parameters: torch.optim.SGD(parameters, momentum=0.9))
    return graph.liveness(), module


def peak_of(liveness, phase, iteration=2):
    return next(one for one in liveness.phases() if (one.phase, one.iteration) == (phase, iteration)).peak_bytes


def test_cross_entropy_makes_no_copy_of_the_logits():
    loss = loss_strategy("transformers-4.45")
    kernel = Kernels(names=("fused-cross-entropy",))
    eager, fused = (peak_of(traced(loss, *more)[0], "forward") for more in ((), (kernel,)))
    logit_copy = ROWS * (TOKENS - 1) * WORDS * 4
    rows = ROWS * (TOKENS - 1)
    # In place of log-probabilities: a loss and a log-sum-exp a row, and which rows count; sums of one number.
    assert logit_copy - 10 * rows <= eager - fused <= logit_copy - 8 * rows


def test_the_gradient_of_a_norm_lies_where_it_came_in():
    """What the kernel saves is the input as it is and a number a row, in place of four tensors of the norm's own."""
    (eager, _), (fused, module) = traced(), traced(Kernels(names=("fused-rmsnorm",)))
    assert peak_of(fused, "forward") < peak_of(eager, "forward")
    # no gradients of norms' weights, so no momentum of theirs
    norms = sum(part.weight.numel() * 2 for part in module.modules() if type(part).__name__ == "LlamaRMSNorm")
    states = [int(one.nbytes[one.category == Category.OPTIMIZER_STATE].sum()) for one in (eager, fused)]
    assert states[0] - states[1] == norms == (2 * LAYERS + 1) * HIDDEN * 2


def test_rope_rotates_in_place():
    """A projection's result is what attention saves; eager saves a rotated copy and makes four more on the way."""
    (eager, _), (fused, _) = traced(), traced(Kernels(names=("fused-rope",)))
    ends = [next(one.end_bytes for one in each.phases() if one.phase == "forward") for each in (eager, fused)]
    assert ends[0] == ends[1]
    born = [
        int((each.nbytes[each.birth < each.num_ops // 2] >= KV_HEADS * 8 * ROWS * TOKENS).sum())
        for each in (eager, fused)
    ]
    assert born[0] - born[1] >= 2 * 4 * LAYERS


@pytest.mark.parametrize("policy", ["none", "full"])
def test_lora_on_nf4_trains_every_adapter(policy):
    quantization = Quantization(scheme="nf4", compute_dtype="bf16")
    lora = LoRA(rank=4, targets=("q_proj", "k_proj", "v_proj", "o_proj"), dropout=0.1)
    liveness, module = traced(quantization, lora, Kernels(names=("fused-lora",)), policy=policy)
    trained = sum(parameter.numel() * 4 for parameter in module.parameters() if parameter.requires_grad)
    assert int(liveness.nbytes[liveness.category == Category.OPTIMIZER_STATE].sum()) == trained
    assert Kernels(names=("fused-lora",)).notes(module) == ()


def test_what_finds_no_place_is_said():
    names = ("fused-rmsnorm", "fused-rope", "fused-lora")
    with torch.device("meta"):
        model = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64))
    strategy = Kernels(names=names)
    assert strategy.notes(strategy.prepare(model)) == tuple(
        f"{name} changes nothing: the model has no place for it" for name in names
    )


def test_a_loss_that_calls_no_cross_entropy_is_said():
    kernel, ids = Kernels(names=("fused-cross-entropy",)), torch.arange(64).view(1, 64)
    said = {}
    for name in ("transformers-4.45", "fused-linear"):
        module = kernel.prepare(loss_strategy(name).prepare(llama()))
        graph, _ = record_training_step(module, {"input_ids": ids, "labels": ids.clone()}, torch.optim.SGD)
        said[name] = kernel.remarks(graph)
    assert said["transformers-4.45"] == ()
    assert "fused-cross-entropy changes nothing" in said["fused-linear"][0]


def test_nothing_stays_patched():
    before = torch.nn.functional.cross_entropy, modeling_llama.apply_rotary_pos_emb
    traced(Kernels(names=("fused-rope", "fused-cross-entropy")), policy="full")
    assert (torch.nn.functional.cross_entropy, modeling_llama.apply_rotary_pos_emb) == before


def test_by_name():
    with pytest.raises(UnknownName, match="fused-rope"):
        Kernels(names=("fused-rop",))
    result = simulate_options("openai-community/gpt2", {"seq_len": 16, "kernels": "fused-cross-entropy"})
    assert f"fused-cross-entropy: {KERNELS['fused-cross-entropy']}" in result.how.assumptions


def test_repeated_keys_and_values_are_saved_for_every_head():
    options = {"seq_len": 64, "batch_size": 2, "weights_dtype": "bf16", "optimizer": "none"}
    plain, repeated = (
        simulate_options("HuggingFaceTB/SmolLM2-135M", options | {"attention": name}).worst
        for name in ("flash2", "flash2-repeat-kv")
    )
    tokens, layers, heads, kv_heads, size = 128, 30, 9, 3, 64
    saved = layers * tokens * 2 * (heads - kv_heads) * size * 2
    ends = [
        next(one.end_bytes for one in rank.phases if one.phase == "forward" and one.iteration == 2)
        for rank in (plain, repeated)
    ]
    # Eager rotary embeddings make the keys that are saved; where they are repeated, the copies are saved instead.
    assert ends[1] - ends[0] == saved
