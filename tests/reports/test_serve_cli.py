"""`metapeak serve` and `metapeak instances` on the command line: the record, the text, and what is refused."""

import json

import pytest

from metapeak.reports.cli import main
from metapeak.reports.commands.base import BAD_INPUT, BORDERLINE, DOES_NOT_FIT, DONE
from tests.reports.command_line import metapeak

GPT2 = "openai-community/gpt2"
# 12 layers x keys and values x 768 x 2 bytes
GPT2_TOKEN = 12 * 2 * 768 * 2


def run(*arguments):
    return main(["serve", *arguments])


def record_of(capsys, *arguments):
    assert run(*arguments, "--json", "-") == DONE
    return json.loads(capsys.readouterr().out)


def test_the_record_has_the_contracts_names(capsys):
    record = record_of(capsys, GPT2, "--gpu", "t4", "--weights-dtype", "fp16")
    names = ("weights_bytes", "kv_bytes_per_token", "state_bytes_per_sequence", "prefill_activation_bytes")
    assert all(isinstance(record[name], int) for name in (*names, "kv_cache_bytes", "kv_tokens"))
    assert record["kv_bytes_per_token"] == GPT2_TOKEN
    assert record["max_concurrent_sequences"] == record["kv_cache_bytes"] // (1024 * GPT2_TOKEN)
    assert record["fit"]["verdict"] == "fits"
    assert record["options"]["gpu"] == {"value": "t4", "from": "command line"}


def test_the_budget_adds_up(capsys):
    record = record_of(capsys, GPT2, "--gpu", "l4", "--engine", "vllm", "--engine-version", "0.10.2")
    charged = sum(
        (item["low"] + item["high"]) // 2 for name, item in record["overheads"].items() if name == "non_torch"
    )
    taken = record["weights_bytes"] + record["prefill_activation_bytes"] + charged + record["kv_cache_bytes"]
    assert taken == record["engine"]["limit_bytes"] == int(record["fit"]["capacity_bytes"] * 0.9)
    assert record["kv_tokens"] == record["kv_cache_bytes"] // (16 * GPT2_TOKEN) * 16
    assert record["weights_requested_bytes"] <= record["weights_bytes"]


def test_fp8_keys_and_values_take_half(capsys):
    plain = record_of(capsys, GPT2, "--gpu", "l4", "--engine", "vllm")
    small = record_of(capsys, GPT2, "--gpu", "l4", "--engine", "vllm", "--kv-dtype", "fp8")
    assert 2 * small["kv_bytes_per_token"] == plain["kv_bytes_per_token"]


def test_quantised_weights_are_the_layers_own_storages(capsys):
    plain = record_of(capsys, GPT2, "--gpu", "l4", "--weights-dtype", "bf16")
    packed = record_of(capsys, GPT2, "--gpu", "l4", "--weights-dtype", "bf16", "--quantization", "nf4")
    matrices = 12 * 12 * 768 * 768
    # nf4: half a byte a weight and a float32 for each block of 64, for two bytes a weight
    assert plain["weights_bytes"] - packed["weights_bytes"] == pytest.approx(matrices * (2 - 0.5625), rel=0.001)


def test_text_names_the_verdict_and_where_memory_goes(capsys):
    assert run(GPT2, "--gpu", "l4", "--engine", "sglang") == DONE
    said = capsys.readouterr().out
    assert "Fits l4" in said
    assert "mem_fraction_static" in said
    assert "36,864 bytes a token" in said


@pytest.mark.parametrize(("memory", "code"), [("24GiB", DONE), ("500MiB", DOES_NOT_FIT), ("700MiB", BORDERLINE)])
def test_require_fit(memory, code):
    assert run(GPT2, "--gpu-memory", memory, "--weights-dtype", "bf16", "--require-fit") == code


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((GPT2,), "needs --gpu"),
        ((GPT2, "--gpu", "l4", "--max-model-len", "4096"), "1024 positions"),
        ((GPT2, "--gpu", "l4", "--context", "900", "--max-model-len", "512"), "past max_model_len"),
        ((GPT2, "--gpu", "l4", "--engine", "vllm", "--quantization", "fp4"), "vllm loads no fp4"),
        ((GPT2, "--gpu", "l4", "--engine", "llama.cpp", "--quantization", "gptq4"), "llama.cpp loads no gptq4"),
        ((GPT2, "--gpu", "a100", "--engine", "vllm", "--quantization", "fp8"), "compute capability >= 8.9"),
        ((GPT2, "--gpu", "t4", "--engine", "vllm", "--kv-dtype", "fp8"), "t4 is 7.5"),
        ((GPT2, "--gpu", "l4", "--engine", "transformers", "--kv-dtype", "q8_0"), "no keys and values in q8_0"),
        (("google-bert/bert-base-uncased", "--gpu", "l4"), "generates no tokens"),
        ((GPT2, "--gpu", "l4", "--tp", "5", "--engine", "vllm"), "heads % tp == 0"),
        ((GPT2, "--gpu", "l4", "--pp", "13", "--engine", "vllm"), "12 blocks"),
        ((GPT2, "--gpu", "l4", "--engine", "llama.cpp", "--tp", "2"), "not modelled"),
        ((GPT2, "--gpu", "l4", "--engine", "ollama"), "Unknown engine"),
        ((GPT2, "--gpu", "l4", "--engine", "vllm", "--engine-version", "latest"), "none such as 0.10.2"),
        ((GPT2, "--gpu", "l4", "--gpu-memory-utilization", "1.5"), "at most 1"),
        (
            (GPT2, "--gpu", "l4", "--engine-version", "0.10.2"),
            "transformers reads no --engine-version. It is read by vllm",
        ),
        (
            (GPT2, "--gpu", "l4", "--gpu-memory-utilization", "0.5"),
            "it takes what it needs. It is read by vllm, sglang, tgi",
        ),
        ((GPT2, "--gpu", "l4", "--engine", "llama.cpp", "--max-num-seqs", "4"), "-np is --concurrency"),
        ((GPT2, "--gpu", "l4", "--engine", "llama.cpp", "--block-size", "16"), "llama.cpp reads no --block-size"),
        ((GPT2, "--gpu", "l4", "--engine", "sglang", "--enforce-eager"), "sglang reads no --enforce-eager"),
        ((GPT2, "--gpu", "l4", "--engine", "tgi", "--pp", "2"), "tensors only"),
        ((GPT2, "--gpu", "l4", "--double-quant"), "double_quant belongs to quantization nf4, fp4"),
        ((GPT2, "--gpu", "l4", "--quantization", "nf4", "--group-size", "64"), "belongs to quantization gptq4"),
        ((GPT2, "--gpu", "l4", "--encoder-tokens", "10"), "keeps nothing of an encoder"),
        ((GPT2, "--gpu", "l4", "--concurrency", "0"), "whole number from 1"),
        (("Qwen/Qwen3-8B", "--gpu", "t4", "--engine", "vllm"), "--weights-dtype fp16"),
    ],
)
def test_bad_input_is_refused_with_the_rule(capsys, arguments, said):
    assert run(*arguments) == BAD_INPUT
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message


def test_options_from_a_file(tmp_path, capsys):
    config = tmp_path / "serve.yaml"
    config.write_text("gpu: l4\nengine: vllm\nmax-model-len: 512\n", encoding="utf-8")
    record = record_of(capsys, GPT2, "--config", str(config))
    assert (record["engine"]["name"], record["max_model_len"]) == ("vllm", 512)
    assert record["options"]["max_model_len"]["from"].endswith("serve.yaml:3")


def test_several_gpus_come_cheapest_that_fits_first(capsys):
    assert run(GPT2, "--gpu", "h100,l4,t4,rtx-4090", "--engine", "vllm", "--json", "-") == DONE
    record = json.loads(capsys.readouterr().out)
    # t4 and l4 are offered for 0.526 and 0.7059 dollars and more; no instance has an RTX 4090
    assert [one["gpu"] for one in record["candidates"]] == ["t4", "l4", "h100-sxm", "rtx-4090"]
    assert record["cheapest_that_fits"] == "t4"
    assert record["candidates"][3]["price_hour"] is None


@pytest.mark.parametrize(("share", "code"), [(0.5, DONE), (0.999, BORDERLINE), (1.5, DOES_NOT_FIT)])
def test_require_fit_of_several_gpus_is_that_of_the_best(capsys, share, code):
    how = ("--engine", "vllm", "--context", "128")
    room = record_of(capsys, GPT2, "--gpu", "l4", *how)
    sequences = int(share * room["kv_cache_range"]["high"] / room["kv_bytes_per_sequence"])
    assert run(GPT2, "--gpu", "t4,l4", *how, "--concurrency", str(sequences), "--require-fit") == code


def test_a_gpu_that_cannot_is_named_with_the_reason(capsys):
    assert run(GPT2, "--gpu", "t4,l4", "--engine", "vllm", "--kv-dtype", "fp8") == DONE
    said = capsys.readouterr().out
    assert "t4: keys and values in fp8" in said
    assert main(["instances", "--gpu", "l4"]) == DONE
    assert "g6.xlarge" in capsys.readouterr().out


def test_speed_and_cost_are_in_the_record(capsys):
    record = record_of(capsys, GPT2, "--gpu", "l4", "--engine", "vllm")
    speed, costs = record["speed"], record["costs"]
    assert 0 < speed["decode_tokens_per_second_one"]["low"] < speed["decode_tokens_per_second_one"]["high"]
    assert costs and costs[0]["usd_per_million_tokens"]["low"] <= costs[-1]["usd_per_million_tokens"]["low"]


def test_an_encoder_decoder_keeps_the_encoders_positions_too(capsys):
    record = record_of(
        capsys, "google-t5/t5-small", "--gpu", "l4", "--weights-dtype", "bf16", "--encoder-tokens", "100"
    )
    # six layers x keys and values x 8 heads of 64 x 2 bytes, for the decoder's tokens and for the encoder's
    assert record["kv_bytes_per_token"] == record["cross_attention_bytes_per_token"] == 6 * 2 * 8 * 64 * 2
    tokens = record["context"] + 100
    assert record["kv_bytes_per_sequence"] == tokens * record["kv_bytes_per_token"]


def test_what_leaves_the_cloud_has_its_price():
    command = ["serve", "Qwen/Qwen3-0.6B", "--gpu", "l4", "--egress-price", "0.09"]
    assert json.loads(metapeak(*command, "--json", "-").stdout)["egress_usd_per_million_tokens"] == 0.00036
    assert "Sending a million tokens as text, 4 bytes each: 0.00036 USD." in metapeak(*command).stdout
    run = metapeak(*command[:-1], "-1")
    assert run.returncode == 1 and "a price is not negative" in run.stderr
