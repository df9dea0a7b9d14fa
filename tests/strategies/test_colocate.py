"""Trainer and engine on one card: a maximum over instants, each named, never the sum of two peaks."""

import json

import pytest

from metapeak.reports.cli import main
from metapeak.reports.commands.base import BAD_INPUT, DOES_NOT_FIT, DONE
from metapeak.strategies import simulate_options
from metapeak.strategies.colocate import colocate
from metapeak.strategies.serving import ServingSpec, serve
from metapeak.tracer.errors import InputError
from metapeak.tracer.gpus import find_gpu
from metapeak.tracer.spec import ModelSpec

GPT2 = "openai-community/gpt2"


@pytest.fixture(scope="module")
def both():
    trainer = simulate_options(GPT2, {"seq_len": 128, "batch_size": 2, "gpu": "l4"})
    spec = ServingSpec(engine="vllm", memory_fraction=0.3)
    return trainer, serve(ModelSpec(reference=GPT2), spec, gpu=find_gpu("l4"))


def by_name(found):
    return {instant.name: instant for instant in found.instants}


def test_the_peak_is_that_of_an_instant_and_less_than_the_sum_of_both_peaks(both):
    trainer, serving = both
    asleep = colocate(trainer, serving, sleep=2)
    assert asleep.peak.device_bytes == max(instant.device_bytes for instant in asleep.instants)
    assert asleep.peak.device_bytes < trainer.worst.device_bytes + serving.budget.limit_bytes
    assert asleep.peak.name == "generation"


def test_while_the_engine_sleeps_a_step_has_the_card_but_for_graphs_and_libraries(both):
    trainer, serving = both
    awake, asleep = by_name(colocate(trainer, serving)), by_name(colocate(trainer, serving, sleep=1))
    cache_and_weights = serving.worst.weights_bytes + serving.worst.kv_cache_bytes
    difference = awake["training step"].device_bytes - asleep["training step"].device_bytes
    assert difference == cache_and_weights
    assert asleep["training step"].trainer.expected_bytes == trainer.worst.reserved_bytes


def test_segments_stay_while_nothing_is_emptied(both):
    trainer, serving = both
    awake, asleep = by_name(colocate(trainer, serving)), by_name(colocate(trainer, serving, sleep=2))
    assert awake["generation"].trainer.expected_bytes == trainer.worst.reserved_bytes
    blocks = asleep["generation"].trainer.expected_bytes
    assert trainer.worst.steady_bytes <= blocks < trainer.worst.reserved_bytes


def test_an_offloaded_trainer_has_nothing_on_the_card_during_generation_but_on_the_host(both):
    found = colocate(*both, sleep=2, offload_trainer=True)
    assert by_name(found)["generation"].trainer.expected_bytes == 0
    assert found.host_bytes >= both[0].worst.steady_bytes
    assert colocate(*both, sleep=1).host_bytes == both[1].worst.weights_bytes


def test_what_cannot_be_is_refused(both):
    with pytest.raises(InputError, match="--sleep 2"):
        colocate(*both, offload_trainer=True)
    with pytest.raises(InputError, match="sleep level 3"):
        colocate(*both, sleep=3)


def test_the_command_names_the_instant_and_answers_with_its_exit_code(capsys):
    step = (GPT2, "--seq-len", "64")
    assert main(["colocate", *step, "--gpu", "l4", "--sleep", "2", "--json", "-", "--require-fit"]) == DONE
    record = json.loads(capsys.readouterr().out)
    assert record["peak"]["instant"] in [instant["name"] for instant in record["instants"]]
    assert record["options"]["serve_gpu_memory_utilization"]["value"] == 0.3
    small = (*step, "--gpu-memory", "3GiB", "--gpu-memory-utilization", "0.9", "--require-fit")
    assert main(["colocate", *small]) == DOES_NOT_FIT
    assert "The peak is at: generation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "needs --gpu"), (("--gpu", "l4", "--serve-engine", "tgi"), "inside a trainer's process")],
)
def test_bad_input(capsys, arguments, said):
    assert main(["colocate", GPT2, *arguments]) == BAD_INPUT
    assert said in capsys.readouterr().err
