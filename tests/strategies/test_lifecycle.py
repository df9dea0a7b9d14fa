"""The life of a job around its training steps: what is asked, refused, shown, and what stays as it was."""

import io

import pytest
import transformers as hf
from rich.console import Console

from metapeak.reports.cli import main
from metapeak.reports.commands.base import BAD_INPUT
from metapeak.reports.data import record_of
from metapeak.reports.life import life_rows, print_life
from metapeak.strategies import simulate_options
from metapeak.tracer.errors import InputError
from metapeak.tracer.liveness import Category
from metapeak.tracer.simulation_file import simulation_from_bytes, simulation_to_bytes


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    config = hf.LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    return str(folder)


def ask(model, **options):
    return simulate_options(model, {"seq_len": 32, **options})


def peaks(result):
    return {phase.phase: phase.peak_bytes for phase in result.worst.phases}


def test_what_follows_training_leaves_its_numbers_as_they_were(llama):
    plain, lived = ask(llama), ask(llama, evaluate=True, generate=3, save="full")
    before, after = plain.worst.phases, lived.worst.phases
    assert after[: len(before)] == before
    assert [phase.phase for phase in after[len(before) :]] == ["evaluation", "generation", "save"]
    assert lived.worst.steady_bytes == plain.worst.steady_bytes
    assert lived.worst.requested_bytes >= plain.worst.requested_bytes
    assert not any("evaluation" in sentence for sentence in plain.how.assumptions)


def test_an_evaluation_of_many_samples_is_the_peak_and_is_named(llama):
    result = ask(llama, eval_logits=True, eval_batch_size=32)
    assert result.worst.peak_at.phase == "evaluation"
    assert record_of(result)["ranks"][0]["phases"][-1]["phase"] == "evaluation"


def test_kept_logits_grow_with_the_batches_and_not_where_they_go_to_the_host(llama):
    logits = 4 * 8 * 32 * 1000
    two, three = (peaks(ask(llama, eval_logits=True, eval_batches=count))["evaluation"] for count in (2, 3))
    assert three - two >= logits
    moved = [
        peaks(ask(llama, eval_logits=True, eval_batches=count, eval_accumulation_steps=1))["evaluation"]
        for count in (2, 3)
    ]
    assert moved[0] == moved[1]


def test_arrays_of_kept_logits_are_counted_on_the_host(llama):
    once = ask(llama, eval_logits=True, eval_batches=2).worst.host["evaluation"]["host_bytes"]
    twice = ask(llama, eval_logits=True, eval_batches=2, eval_accumulation_steps=1).worst.host["evaluation"]
    samples = 2 * 8
    assert once == samples * (32 * 1000 * 4 + 32 * 8 + 4)  # logits, labels, a loss
    assert twice["host_bytes"] == 2 * once


def test_a_workspace_of_cublas_is_there_once_for_the_whole_life(llama):
    def handles(result):
        liveness = result.worst.liveness
        lasting = (liveness.category == Category.WORKSPACE) & (liveness.death > liveness.num_ops)
        return int(lasting.sum())

    assert handles(ask(llama, evaluate=True)) == handles(ask(llama)) == 2


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_a_full_state_dict_on_the_device_is_the_whole_model_and_one_for_the_host_is_not(llama, engine):
    kept, offloaded, sharded = (
        ask(llama, dp_shard=2, engine=engine, save=save) for save in ("full-on-device", "full", "sharded")
    )
    whole = kept.model.parameter_bytes
    grown = [peaks(result)["save"] - result.worst.steady_bytes for result in (kept, offloaded, sharded)]
    assert grown[0] >= whole > grown[1] > 0
    # FSDP1 gathers for shards, too, and cuts them from what it gathered.
    assert grown[2] == 0 if engine == "fsdp2" else 0 < grown[2] <= grown[0]
    assert offloaded.worst.host["save"]["host_bytes"] == whole


def test_every_rank_gathers_the_logits_of_all(llama):
    one, two = (
        peaks(ask(llama, eval_logits=True, eval_batches=1, **more))["evaluation"] for more in ({}, {"dp_replicate": 2})
    )
    assert two - one >= 4 * 8 * 32 * 1000


def test_a_weight_that_is_packed_while_loading_lies_beside_its_packed_one(llama):
    plain = ask(llama, method="qlora")
    load = plain.worst.phases[0]
    assert load.peak_bytes >= load.end_bytes
    assert plain.worst.host["load"]["host_bytes"] == 4 * 1000 * 64  # one tensor at a time, the largest


def test_loading_a_sharded_model_straight_to_the_device_takes_all_of_it(llama):
    whole = ask(llama, dp_shard=2, load="device")
    shards = ask(llama, dp_shard=2)
    assert whole.worst.phases[0].peak_bytes >= whole.model.parameter_bytes > shards.worst.phases[0].peak_bytes
    assert shards.worst.host["load"]["host_bytes"] >= whole.model.parameter_bytes
    assert shards.worst.requested_bytes == ask(llama, dp_shard=2, load="cpu").worst.requested_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_batch_size": 4}, "--evaluate"),
        ({"evaluate": True, "eval_accumulation_steps": 1}, "--eval-logits"),
        ({"prompt_len": 4}, "--generate"),
        ({"save": "merged"}, "no adapters"),
        ({"save": "adapter"}, "no adapters"),
        ({"save": "sharded"}, "nothing is sharded"),
        ({"save": "merged", "method": "lora", "dp_shard": 2}, "whole layers"),
        ({"save": "merged", "method": "qlora"}, "nf4"),
        ({"evaluate": True, "eval_batches": 0}, "whole number"),
    ],
)
def test_what_nothing_would_read_is_refused(llama, options, message):
    with pytest.raises(InputError, match=message):
        ask(llama, **options)


def test_a_generation_by_rules_on_values_is_refused():
    with pytest.raises(InputError, match="speech"):
        ask("openai/whisper-tiny", generate=2)


def test_an_encoder_decoder_generates_beside_its_encoder():
    result = ask("google-t5/t5-small", generate=2, eval_batch_size=2)
    assert peaks(result)["generation"] > result.worst.steady_bytes


def test_policies_are_compared_for_training_steps_only(llama, capsys):
    assert main(["checkpointing", llama, "--evaluate"]) == BAD_INPUT
    assert "training steps" in capsys.readouterr().err


# -- phases that were not asked for ------------------------------------------------------------------------------------


def whole(model, **options):
    return simulate_options(model, {"seq_len": 32, **options}, whole_life=True)


def unasked(result):
    return {phase.phase: (phase.peak_bytes, phase.end_bytes) for phase in result.unasked}


def life_line(result):
    console = Console(file=io.StringIO(), width=200)
    print_life(result, console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("options", "save"),
    [
        ({}, "full"),
        ({"method": "lora", "checkpointing": "full"}, "adapter"),
        ({"dp_shard": 2}, "sharded"),
        ({"dp_shard": 2, "engine": "fsdp1"}, "full"),
        ({"dp_replicate": 2}, "full"),
    ],
)
def test_what_nobody_asked_for_is_as_if_it_was_asked_for_and_counts_in_nothing(llama, options, save):
    plain, shown = ask(llama, **options), whole(llama, **options)
    asked = ask(llama, **options, evaluate=True, eval_batches=1, save=save)
    later = asked.worst.phases[len(plain.worst.phases) :]
    assert unasked(shown) == {phase.phase: (phase.peak_bytes, phase.end_bytes) for phase in later}
    assert shown.worst.phases == plain.worst.phases
    assert shown.worst.device_range == plain.worst.device_range
    assert any(f"save {save}" in sentence for sentence in shown.how.assumptions)


def test_every_phase_has_a_row_and_one_is_the_peak(llama):
    result = whole(llama, generate=3)
    rows = life_rows(result)
    phases = ["load", "first step", "steady step", "generation", "evaluation", "save"]
    assert [row["phase"] for row in rows] == phases
    assert [row["phase"] for row in rows if not row["asked"]] == ["evaluation", "save"]
    (peak,) = [row for row in rows if row["is_peak"]]
    assert peak["peak_bytes"] == max(row["peak_bytes"] for row in rows if row["asked"])
    assert record_of(result)["life"] == rows
    assert rows[-1]["host_bytes"] == result.model.parameter_bytes
    again = simulation_from_bytes(simulation_to_bytes(result), None)
    assert life_rows(again) == rows


def test_an_evaluation_that_needs_more_than_training_is_said(llama):
    assert "evaluation would need" in life_line(whole(llama, seq_len=256))
    asked = whole(llama, seq_len=256, evaluate=True, eval_batch_size=1)
    assert "would need" not in life_line(asked) and list(unasked(asked)) == ["save"]


def test_programs_that_are_no_trainer_evaluate_with_their_own_batch(llama):
    sizes = {
        preset: unasked(whole(llama, preset=preset, batch_size=2))["evaluation"][0]
        for preset in ("hf-trainer", "litgpt")
    }
    logits = 32 * 1000 * 2  # of a sample, 16 bit
    assert sizes["hf-trainer"] - sizes["litgpt"] > 6 * logits


def test_phases_that_cannot_be_told_are_said_unless_they_were_asked_for(llama):
    result = whole(llama, pp=2, microbatches=2)
    assert result.unasked == ()
    assert "evaluation and save under pipeline parallel" in result.how.not_modelled
    with pytest.raises(InputError, match="pipeline"):
        ask(llama, pp=2, microbatches=2, evaluate=True)


def test_an_evaluation_that_fails_fails_no_estimate(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    result = whole(f"{path}:job")
    assert result.unasked == ()
    assert "no labels while it is evaluated" in result.how.not_modelled[-1]


MINE = """
import torch


class Picky(torch.nn.Linear):
    def forward(self, x):
        if not self.training:
            raise ValueError("no labels while it is evaluated")
        return super().forward(x)


def job():
    return Picky(4, 4), torch.empty(2, 4), lambda model, batch: model(batch).sum()
"""
