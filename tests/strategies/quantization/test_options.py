"""Options, configs of quantised checkpoints, and what is refused."""

import argparse
import json

import pytest
import transformers

from metapeak.reports.options import add_to_parser, resolve_options
from metapeak.reports.summary import describe_method
from metapeak.strategies import simulate
from metapeak.strategies.lora import LoRA
from metapeak.strategies.quantization import Quantization
from metapeak.strategies.quantization.from_config import checkpoint_quantization, with_checkpoint_quantization
from metapeak.strategies.request import strategies_of
from metapeak.tracer import ModelSpec, StepSpec
from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.models import resolve_model

STEP = StepSpec(batch_size=1, seq_len=16)


def strategies(*arguments):
    parser = argparse.ArgumentParser()
    add_to_parser(parser)
    return strategies_of(resolve_options(parser.parse_args(list(arguments))))


def test_qlora_is_nf4_with_double_quantisation_and_adapters():
    base, adapters = strategies("--method", "qlora")
    assert (base.scheme, base.double_quant, base.kbit_prepare) == ("nf4", True, False)
    assert isinstance(adapters, LoRA)


def test_every_option_reaches_the_strategy():
    base, *_ = strategies(
        "--method", "qlora", "--quantization", "fp4", "--compute-dtype", "fp32", "--quant-storage", "bf16",
        "--skip-modules", "lm_head,down_proj", "--kbit-prepare",
    )  # fmt: skip
    assert base == Quantization(
        scheme="fp4", double_quant=True, compute_dtype="fp32", quant_storage="bf16",
        skip_modules=("lm_head", "down_proj"), kbit_prepare=True,
    )  # fmt: skip
    base, *_ = strategies("--method", "lora", "--quantization", "gptq8", "--group-size", "-1", "--gptq-kernel", "torch")
    assert (base.scheme, base.bits, base.group_size, base.gptq_kernel) == ("gptq8", 8, -1, "torch")
    assert strategies("--method", "lora", "--quantization", "nf4")[0].double_quant is False


def test_a_mapping_in_a_config_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "method: qlora\nquantization: {type: nf4, double_quant: false, compute_dtype: bf16, kbit_prepare: true}\n"
    )
    base, _ = strategies("--config", str(path))
    assert base == Quantization(scheme="nf4", double_quant=False, compute_dtype="bf16", kbit_prepare=True)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--quantization", "nf4"], "nf4 weights cannot be trained: use --method qlora"),
        (["--method", "qlora", "--quantization", "none"], "with quantization none give --method lora"),
        (["--double-quant"], "double_quant belongs to a quantised base"),
        (["--method", "lora", "--kbit-prepare"], "kbit_prepare belongs to a quantised base"),
        (["--method", "qlora", "--quantization", "int8", "--double-quant"], "int8 does not read it"),
        (["--method", "qlora", "--quantization", "int8", "--compute-dtype", "bf16"], "compute_dtype belongs to nf4"),
        (["--method", "qlora", "--quantization", "nf4", "--group-size", "128"], "group_size belongs to gptq4"),
        (["--method", "qlora", "--quantization", "awq4", "--gptq-kernel", "torch"], "gptq_kernel belongs to gptq4"),
        (["--method", "qlora", "--quantization", "awq4", "--compute-dtype", "fp16"], "compute_dtype belongs to nf4"),
        (["--method", "qlora", "--quantization", "gptq4", "--group-size", "7"], "group_size is 7"),
        (["--method", "qlora", "--quantization", "awq4", "--quant-storage", "bf16"], "quant_storage belongs to nf4"),
    ],
)
def test_contradictions_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        strategies(*arguments)


@pytest.mark.parametrize(
    "arguments", [["--quantization", "nf5"], ["--method", "qlora", "--compute-dtype", "bf17"]], ids=str
)
def test_unknown_names(arguments):
    with pytest.raises(UnknownName, match=r"nf4|bf16"):
        strategies(*arguments)


def test_the_quantization_config_of_checkpoints():
    def of(reference):
        return checkpoint_quantization(resolve_model(ModelSpec(reference=reference)).config_dict)

    assert of("unsloth/Qwen2.5-7B-Instruct-bnb-4bit") == Quantization(
        scheme="nf4", double_quant=True, compute_dtype="bf16", origin="checkpoint"
    )
    assert "model.layers.0.mlp" in of("unsloth/Qwen2.5-0.5B-Instruct-unsloth-bnb-4bit").skip_modules
    assert of("TheBloke/Llama-2-70B-GPTQ") == Quantization(scheme="gptq4", group_size=-1, origin="checkpoint")
    assert of("cognitivecomputations/DeepSeek-R1-AWQ") == Quantization(
        scheme="awq4", group_size=64, origin="checkpoint"
    )
    assert of("mistralai/Mistral-7B-v0.1") is None and of("openai/gpt-oss-20b") is None
    assert checkpoint_quantization({"quantization_config": {"quant_method": "gptq", "bits": 3}}) is None


@pytest.mark.parametrize(
    "reference, said",
    [
        ("openai/gpt-oss-20b", "dequantised for training"),
        ("deepseek-ai/DeepSeek-V3", r"quantised \(fp8\); the model is built with plain"),
    ],
)
def test_checkpoints_that_are_built_plain_say_so(reference, said):
    import re

    resolved = resolve_model(ModelSpec(reference=reference))
    unchanged, (note,) = with_checkpoint_quantization(resolved, [])
    assert unchanged == [] and re.search(said, note)


def folder(tmp_path, quantization=None, **changes):
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=96, architectures=["LlamaForCausalLM"], dtype="float16", **changes,
    ).to_dict()  # fmt: skip
    if quantization:
        config["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
# 7 linear layers in each of 2 blocks: 4 x 64 x 64 + 3 x 64 x 128 weights.
WEIGHTS = 2 * (4 * 64 * 64 + 3 * 64 * 128)


def test_a_quantised_checkpoint_is_trained_as_it_is(tmp_path):
    reference = folder(tmp_path, GPTQ)
    with pytest.raises(InputError, match="gptq4 weights cannot be trained: use --method qlora, or name the repository"):
        simulate(reference, STEP)
    with pytest.raises(InputError, match=r"is quantised already \(gptq\); nf4 was asked for"):
        simulate(reference, STEP, strategies("--method", "qlora", "--quantization", "nf4"))
    with pytest.raises(InputError, match=r"is quantised already \(gptq4\), and quantization none was asked for"):
        simulate(reference, STEP, strategies("--method", "lora", "--quantization", "none"))
    with pytest.raises(InputError, match="with group_size 32; 128 was asked for"):
        simulate(reference, STEP, strategies("--method", "qlora", "--quantization", "gptq4", "--group-size", "128"))
    with pytest.raises(InputError, match="with group_size 32; 64 was asked for"):
        simulate(reference, STEP, strategies("--method", "lora", "--quantization", "gptq4", "--group-size", "64"))
    asked, own = (
        simulate(reference, STEP, strategies("--method", method, *more))
        for method, more in (("qlora", ("--quantization", "gptq4", "--group-size", "32")), ("lora", ()))
    )
    assert asked.model == own.model
    # qweight, qzeros and scales of 32 inputs, g_idx; embeddings, head, norms in float16; adapters of rank 16 in float32
    # on q and v.
    groups = WEIGHTS // 32
    g_idx = 2 * (6 * 64 + 128) * 4
    rest, adapters = (2 * 96 * 64 + 5 * 64) * 2, 4 * 16 * (64 + 64) * 4
    assert own.model.parameter_bytes == WEIGHTS // 2 + groups // 2 + groups * 2 + g_idx + rest + adapters
    assert own.model.parameters == WEIGHTS + rest // 2 + adapters // 4
    assert own.model.trainable_parameters == adapters // 4


def test_a_python_caller_is_refused_too(tmp_path):
    reference = folder(tmp_path)
    with pytest.raises(InputError, match="nf4 weights cannot be trained"):
        simulate(reference, STEP, [Quantization()])
    with pytest.raises(InputError, match="put Quantization first"):
        simulate(reference, STEP, [LoRA(), Quantization()])


def test_states_of_qlora_below_lora_below_full(tmp_path):
    reference = folder(tmp_path)
    full, lora, int8, qlora = (
        simulate(reference, STEP, chosen).worst.steady_bytes
        for chosen in ([], [LoRA()], [Quantization(scheme="int8"), LoRA()], strategies("--method", "qlora"))
    )
    assert qlora < int8 < lora < full


def test_the_report_says_what_was_taken(tmp_path):
    said = " ".join(simulate(folder(tmp_path), STEP, strategies("--method", "qlora")).how.assumptions)
    assert "prepare_model_for_kbit_training is taken not to run" in said
    assert "compute in the dtype of the weights" in said
    assert "nf4 with double quantisation on 14 linear layers: 81,920 weights" in said
    assert "what method qlora takes unless told otherwise" in said


def test_fused_experts_stay_and_the_report_says_so():
    import torch

    config = transformers.MixtralConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=2, vocab_size=96,
    )  # fmt: skip
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    base = Quantization()
    module = LoRA(targets=("q_proj",)).prepare(base.prepare(module))
    said = f"{2 * 3 * 64 * 96:,} weights are in parameters of three dimensions"
    assert any(said in note for note in base.notes(module))


def test_options_show_where_the_base_comes_from(tmp_path):
    result = simulate(folder(tmp_path, GPTQ), STEP, [LoRA()])
    assert (result.options["quantization"].value, result.options["quantization"].origin) == ("gptq4", "model config")
    assert result.options["group_size"].value == 32
    packed = simulate(folder(tmp_path), STEP, strategies("--method", "qlora")).options
    assert (packed["compute_dtype"].value, packed["double_quant"].origin) == ("fp16", "method qlora")
    assert describe_method(result).endswith(", on a gptq4 base")
