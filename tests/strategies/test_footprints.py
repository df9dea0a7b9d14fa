"""Cases side by side, and how they relate."""

import json

import pytest

from metapeak.reports.footprints import simulate_case
from metapeak.strategies import simulate_options
from metapeak.strategies.footprints import STANDARD_CASES, Case, footprints, smallest_gpu
from metapeak.tracer.device.overheads import device_bytes, overheads
from metapeak.tracer.gpus import all_gpus
from metapeak.tracer.liveness import Category
from tests.reports.command_line import metapeak

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.fixture(scope="module")
def results(model):
    cases = footprints(STANDARD_CASES, lambda case: simulate_case(model, case, (), lambda what: None))
    return {result.case.name: result for result in cases}


def states(simulation):
    """Bytes of optimizer states and gradients: what is kept for training beside the weights."""
    rows = simulation.worst.liveness
    kept = (rows.category == Category.OPTIMIZER_STATE) | (rows.category == Category.GRADIENT)
    return int(rows.nbytes[kept].sum())


def test_qlora_needs_less_than_lora_and_lora_less_than_all(results):
    qlora, lora, full = (results[name].simulation for name in ("QLoRA", "LoRA", "full fine-tune"))
    assert states(qlora) == states(lora) < states(full)
    assert qlora.model.parameter_bytes < lora.model.parameter_bytes
    assert results["QLoRA"].states_bytes < results["LoRA"].states_bytes < results["full fine-tune"].states_bytes


def test_pretraining_has_long_sequences_and_float32_weights(results):
    options = results["pre-training"].simulation.options
    assert (options["seq_len"].value, options["weights_dtype"].value, options["autocast"].value) == (
        4096,
        "fp32",
        "bf16",
    )
    assert results["full fine-tune"].simulation.options["seq_len"].value == 2048


@pytest.mark.parametrize("options", [{}, {"method": "lora"}])
def test_no_logits_never_needs_more_than_all_of_them(model, options):
    base = {"precision": "bf16", "seq_len": 512, **options}
    peaks = [
        simulate_options(model, {**base, "loss": loss}).worst.requested_bytes for loss in ("eager", "fused-linear")
    ]
    assert peaks[1] <= peaks[0]


def test_eight_bit_states_are_smaller(model):
    eight, thirty_two = (
        simulate_options(model, {"precision": "bf16", "seq_len": 64, "optimizer": name}).worst.breakdown
        for name in ("adamw8bit", "adamw32bit")
    )
    assert eight[Category.OPTIMIZER_STATE] < thirty_two[Category.OPTIMIZER_STATE] / 3


def test_a_tied_head_is_counted_once(tmp_path):
    sizes = []
    for tied in (True, False):
        path = tmp_path / f"{tied}.json"
        path.write_text(json.dumps({**TINY, "tie_word_embeddings": tied}))
        sizes.append(simulate_options(str(path), {"seq_len": 64}).model.parameter_bytes)
    assert sizes[1] - sizes[0] == 2 * TINY["vocab_size"] * TINY["hidden_size"]


def test_the_smallest_gpu_holds_it_and_no_smaller_one_does(results):
    result = results["pre-training"]
    rank, chosen = result.simulation.worst, result.smallest_gpu
    need = {gpu.id: device_bytes(rank.reserved_bytes, overheads(gpu))[1] for gpu in all_gpus()}
    assert need[chosen.id] <= chosen.usable_bytes
    assert all(gpu.usable_bytes >= chosen.usable_bytes for gpu in all_gpus() if need[gpu.id] <= gpu.usable_bytes)
    assert smallest_gpu(result.simulation, [gpu for gpu in all_gpus() if gpu.usable_bytes < need[gpu.id]]) is None


def test_a_case_that_cannot_be_is_kept_with_its_reason(model):
    (result,) = footprints(
        [Case(name="odd", options={"optimizer": "lbfgs"})], lambda case: simulate_case(model, case, (), print)
    )
    assert result.simulation is None and "lbfgs" in result.refused


def test_the_command_prints_a_row_a_case(model):
    done = metapeak("footprints", model, "--seq-len", "64", "--case", "8-bit:optimizer=adamw8bit;precision=bf16")
    assert done.returncode == 0, done.stderr
    for name in ("pre-training", "full fine-tune", "LoRA", "QLoRA", "8-bit", "smallest GPU"):
        assert name in done.stdout
    record = json.loads(metapeak("footprints", model, "--only", "--case", "a:seq-len=32", "--json", "-").stdout)
    (row,) = record["footprints"]
    assert row["estimate"]["options"]["seq_len"] == {"value": 32, "from": "case a"}
    assert row["peak_bytes"] == row["estimate"]["ranks"][0]["peak"]["allocated_bytes"]


@pytest.mark.parametrize("case", ["nameless", "name:", "name:seq_len", ":seq_len=3", "a:sequence=3", "a:seq_len=long"])
def test_a_bad_case_gets_one_message(model, case):
    done = metapeak("footprints", model, "--only", "--case", case)
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) <= 1
    assert "Traceback" not in done.stderr
