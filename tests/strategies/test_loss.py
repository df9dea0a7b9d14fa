"""The option `loss`: what it takes and refuses, and relations between the paths."""

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as some

from metapeak.strategies import simulate
from metapeak.strategies.loss import LOSSES, Loss, LossSpec, install_loss, loss_strategy, parse_loss
from metapeak.tracer import ModelSpec, StepSpec
from metapeak.tracer.capture import default_loss, record_training_step
from metapeak.tracer.errors import InputError, UnknownName


def llama(**changes):
    config = hf.LlamaConfig(
        **{
            "vocab_size": 512,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 32,
            "use_cache": False,
            **changes,
        }
    )
    with torch.device("meta"):
        return hf.LlamaForCausalLM(config).to(torch.bfloat16).train()


def phases_of(model, rows=2, tokens=64, loss=None, keep=False):
    ids = torch.arange(rows * tokens).view(rows, tokens) % 101
    strategy = loss_strategy(loss, None, keep)
    compute_loss = default_loss
    if strategy is not None:
        model = strategy.prepare(model)
        compute_loss = strategy.loss_function(compute_loss)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    graph, _ = record_training_step(model, inputs, torch.optim.SGD, compute_loss=compute_loss)
    return {(phase.iteration, phase.phase): phase for phase in graph.liveness().phases()}


def peak(*args, **options):
    return max(phase.peak_bytes for phase in phases_of(*args, **options).values())


@pytest.mark.parametrize(
    "text, spec",
    [
        (None, LossSpec()),
        ("none", LossSpec()),
        ("chunked:8", LossSpec(family="chunked", count=8)),
        ("fused-linear", LossSpec(family="fused-linear")),
    ],
)
def test_parse(text, spec):
    assert parse_loss(text) == spec


@pytest.mark.parametrize("text", ["chunked", "chunked:", "chunked:0", "chunked:x", "chunked:-1", "fused-linear:8"])
def test_bad_numbers_are_refused(text):
    with pytest.raises(InputError, match="number"):
        parse_loss(text)


def test_an_unknown_loss_lists_the_known():
    with pytest.raises(UnknownName, match="fused-linear"):
        parse_loss("fused_linear")


def test_chunk_tokens_go_with_chunked_alone():
    assert parse_loss("chunked:4", 128) == LossSpec(family="chunked-tokens", count=128)
    with pytest.raises(InputError, match="goes with loss chunked"):
        parse_loss("fused-linear", 128)


def test_nothing_asked_is_no_strategy():
    assert loss_strategy(None) is None
    assert loss_strategy("eager") is None
    assert loss_strategy(None, keep_outputs=True) == Loss(keep_outputs=True)


def test_a_model_of_another_task_is_refused():
    step = StepSpec(batch_size=1, seq_len=16)
    with pytest.raises(InputError, match="output head over the vocabulary"):
        simulate(ModelSpec(reference="google-bert/bert-base-uncased"), step, [loss_strategy("chunked:8")])


def test_a_model_without_a_head_is_refused():
    with torch.device("meta"):
        model = hf.LlamaModel(llama().config)
    with pytest.raises(InputError, match="LlamaModel has none"):
        install_loss(model, parse_loss("fused-linear"))


def test_a_loss_of_a_version_that_did_not_know_the_class_is_refused():
    with torch.device("meta"):
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(vocab_size=64, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(InputError, match=r"transformers 4.48, and Qwen3ForCausalLM"):
        install_loss(model, parse_loss("transformers-4.48"))


@pytest.mark.parametrize("loss", ["fused-linear", "fused-head", "chunked:4"])
def test_lora_on_the_head_is_refused(loss):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj", "lm_head"]))
    with pytest.raises(InputError, match="LoRA adapter sits on it"):
        install_loss(adapted, parse_loss(loss))


@pytest.mark.parametrize("loss", ["fused-linear", "fused-head", "chunked:4", "transformers-4.48"])
def test_peft_may_wrap_the_model_before_or_after(loss):
    peft = pytest.importorskip("peft")

    def adapt(model):
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))

    wrapped = adapt(llama())
    install_loss(wrapped, parse_loss(loss))
    model = llama()
    install_loss(model, parse_loss(loss))
    after, before = phases_of(wrapped), phases_of(adapt(model))
    assert [phase.peak_bytes for phase in after.values()] == [phase.peak_bytes for phase in before.values()]


def test_backward_in_chunks_refuses_a_sequence_that_does_not_divide():
    with pytest.raises(InputError, match=r"64 % 7 = 1"):
        phases_of(llama(), loss="chunked-backward:7")


def test_every_path_says_what_it_assumes():
    for name, family in LOSSES.items():
        spec = LossSpec(family=name, count=4 if family.argument else None)
        first, *_ = Loss(spec=spec).assumptions()
        assert first.startswith(f"loss path {spec.name}: ")
        assert "{n}" not in first


@settings(derandomize=True, max_examples=10, deadline=None)
@given(
    rows=some.integers(1, 3),
    tokens=some.sampled_from([16, 33, 64]),
    vocabulary=some.integers(200, 2000),
    hidden=some.sampled_from([8, 16, 32]),
    tied=some.booleans(),
)
def test_less_than_all_logits_never_needs_more(rows, tokens, vocabulary, hidden, tied):
    shape = {"vocab_size": vocabulary, "hidden_size": hidden, "tie_word_embeddings": tied}
    full = peak(llama(**shape), rows, tokens)
    assert peak(llama(**shape), rows, tokens, loss="chunked:4") <= full
    assert peak(llama(**shape), rows, tokens, loss="fused-linear") <= full
    assert full <= peak(llama(**shape), rows, tokens, keep=True)


def test_tied_heads_are_counted_once():
    shape = {"vocab_size": 2048, "hidden_size": 16}
    untied, tied = (phases_of(llama(**shape, tie_word_embeddings=tie), loss="fused-linear") for tie in (False, True))
    weight = 2048 * 16 * 2
    assert untied[0, "load"].end_bytes - tied[0, "load"].end_bytes == weight
    # At the end of backward: weight and gradient.
    assert untied[1, "backward"].end_bytes - tied[1, "backward"].end_bytes == 2 * weight


def test_a_kept_output_lives_until_the_next_one():
    logits = 2 * 64 * 512 * 2
    plain, kept = (phases_of(llama(), keep=keep) for keep in (False, True))
    assert kept[1, "backward"].end_bytes - plain[1, "backward"].end_bytes == logits
    assert kept[2, "forward"].peak_bytes - plain[2, "forward"].peak_bytes == logits


@pytest.mark.parametrize("loss", ["chunked-ce:16", "chunked-tokens:16"])
def test_litgpts_logits_live_until_the_next_ones_are_there(loss):
    phases = phases_of(llama(), loss=loss)
    logits = 2 * 64 * 512 * 2
    parameters_and_inputs = phases[0, "load"].end_bytes
    assert phases[1, "optimizer"].end_bytes - parameters_and_inputs == pytest.approx(logits, abs=logits // 64 + 8)
    # The old ones are gone when the loss is computed: the steady peak is the first one's, and the last loss.
    assert phases[2, "forward"].peak_bytes - phases[1, "forward"].peak_bytes <= 8


def test_the_graph_dies_after_backward():
    """A frozen embedding's output that was made to require a gradient, and that gradient: not there between steps."""
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    without = phases_of(model)[1, "optimizer"].end_bytes
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    model.enable_input_require_grads()
    assert phases_of(model)[1, "optimizer"].end_bytes == without
