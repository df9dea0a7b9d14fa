"""Precision and the training loop as options: what is refused, what is said, what the report shows."""

import argparse
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from metapeak.reports.cli import main
from metapeak.reports.dtypes import dtype_rows
from metapeak.reports.options import add_to_parser, resolve_options
from metapeak.strategies import simulate
from metapeak.strategies.precision import check_precision, precision_notes, training_loop
from metapeak.strategies.request import model_spec, step_spec
from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.gpus import find_gpu
from metapeak.tracer.spec import ModelSpec, OptimizerSpec, StepSpec

MODEL = ModelSpec(reference="mine")

JOB = """
import torch

class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, 512, bias=False)

    def forward(self, x):
        return self.head(torch.nn.functional.gelu(self.body(x)))

def job():
    loss = lambda model, batch: model(batch[0]).float().logsumexp(-1).sum()
    return Head(), (torch.empty(32, 64),), loss
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "mine.py"
    path.write_text(JOB)
    return f"{path}:job"


def options_of(*flags):
    parser = argparse.ArgumentParser()
    add_to_parser(parser)
    return resolve_options(parser.parse_args(flags))


@pytest.mark.parametrize(
    "name, weights, autocast",
    [
        ("fp32", "float32", None),
        ("bf16", "bfloat16", None),
        ("fp16", "float16", None),
        ("bf16-mixed", "float32", "bfloat16"),
        ("fp16-mixed", "float32", "float16"),
    ],
)
def test_a_precision_is_a_pair(name, weights, autocast):
    options = options_of("--precision", name)
    assert model_spec("m", options).dtype == weights
    assert step_spec(options).autocast == autocast
    assert "--precision" in options["weights_dtype"].origin


def test_what_is_said_closer_wins(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("precision: bf16-mixed\nmax_grad_norm: 1\nmaster_weights: true\n")
    options = options_of("--config", str(file))
    assert step_spec(options).autocast == "bfloat16" and step_spec(options).max_grad_norm == 1
    assert options["autocast"].origin == f"{file}:1 (--precision)"
    assert step_spec(options).optimizer.master_weights
    options = options_of("--config", str(file), "--weights-dtype", "bf16")
    assert (model_spec("m", options).dtype, step_spec(options).autocast) == ("bfloat16", "bfloat16")
    options = options_of("--config", str(file), "--precision", "fp32")
    assert (model_spec("m", options).dtype, step_spec(options).autocast) == ("float32", None)
    file.write_text("precision: fp8\n")
    with pytest.raises(UnknownName, match="Unknown precision 'fp8'"):
        options_of("--config", str(file))


def in_backward(**arguments):
    return StepSpec(optimizer=OptimizerSpec(implementation="in-backward"), **arguments)


@pytest.mark.parametrize(
    "step, message",
    [
        (StepSpec(autocast="float8"), "Unknown autocast dtype"),
        (StepSpec(autocast_region="everything"), "Unknown autocast region"),
        (StepSpec(grad_accum_dtype="bfloat16"), "float32"),
        (StepSpec(grad_accum=0), "grad_accum is 0"),
        (StepSpec(max_grad_norm=-1.0), "max_grad_norm is -1.0"),
        (StepSpec(max_grad_norm=float("nan")), "max_grad_norm is nan"),
        (in_backward(grad_accum=2), "excludes grad_accum: gradients are freed"),
        (in_backward(max_grad_norm=1.0), "excludes max_grad_norm"),
        (in_backward(autocast="float16"), "excludes autocast fp16"),
    ],
)
def test_refused_before_anything_is_built(step, message):
    with pytest.raises(InputError, match=message):
        check_precision(MODEL, step, None)


def test_bf16_on_a_gpu_that_has_none():
    t4 = find_gpu("t4")
    for spec, step in (
        (ModelSpec(reference="m", dtype="bfloat16"), StepSpec()),
        (MODEL, StepSpec(autocast="bfloat16")),
    ):
        with pytest.raises(InputError, match=r"t4 has none: compute capability 7.5 < 8.0.*Use fp16-mixed"):
            check_precision(spec, step, t4)
        check_precision(spec, step, find_gpu("a100"))
    check_precision(MODEL, StepSpec(autocast="float16"), t4)
    model = nn.Linear(2, 2, dtype=torch.bfloat16, device="meta")  # nobody asked: the model's own
    assert any("t4 has not" in note for note in precision_notes(StepSpec(), model, t4, own_loss=False))


def test_fp16_needs_float32_gradients_for_its_scaler():
    half, single = (nn.Linear(2, 2, dtype=dtype, device="meta") for dtype in (torch.float16, torch.float32))
    mixed = StepSpec(autocast="float16")
    with pytest.raises(InputError, match=r"Attempting to unscale FP16 gradients.*fp16-mixed"):
        training_loop(mixed, half, own_loss=False)
    assert training_loop(mixed, single, own_loss=False).grad_scaler
    assert training_loop(
        StepSpec(autocast="float16", optimizer=OptimizerSpec(master_weights=True)), half, own_loss=False
    ).grad_scaler
    adapters = nn.Sequential(half.requires_grad_(False), single)  # float32 adapters on a frozen fp16 base
    assert training_loop(mixed, adapters, own_loss=False).grad_scaler
    (note,) = precision_notes(StepSpec(), nn.Linear(2, 2, dtype=torch.float16, device="meta"), None, own_loss=False)
    assert "without loss scaling" in note


def test_float32_accumulation_needs_an_optimizer_that_can_see_it():
    low = nn.Linear(2, 2, dtype=torch.bfloat16, device="meta")
    step = StepSpec(grad_accum_dtype="float32")
    with pytest.raises(InputError, match=r"weights in bfloat16.*--master-weights"):
        training_loop(step, low, own_loss=False)
    single = nn.Linear(2, 2, device="meta")
    assert training_loop(step, single, own_loss=False).accumulate_in_float32
    assert any("changes nothing" in note for note in precision_notes(step, single, None, own_loss=False))


def test_where_autocast_ends():
    model, step = nn.Linear(2, 2, device="meta"), StepSpec(autocast="bfloat16")
    assert training_loop(step, model, own_loss=False).autocast_region == "forward"
    assert training_loop(step, model, own_loss=True).autocast_region == "loss"
    asked = StepSpec(autocast="bfloat16", autocast_region="forward")
    assert training_loop(asked, model, own_loss=True).autocast_region == "forward"


def test_dtypes_and_bytes_of_everything(job):
    parameters = 64 * 64 + 64 + 64 * 512
    step = StepSpec(grad_accum=2, grad_accum_dtype="float32", optimizer=OptimizerSpec(master_weights=True))
    options = {"master_weights": SimpleNamespace(value=True, origin="here")}
    rows = {
        row["what"]: row["bytes"]
        for row in dtype_rows(simulate(ModelSpec(reference=job, dtype="bfloat16"), step, options=options))
    }
    assert rows["weights"] == {"bfloat16": 2 * parameters}
    assert rows["master weights"] == rows["accumulated gradients"] == {"float32": 4 * parameters}
    assert rows["optimizer states"] == {"float32": 8 * parameters}
    assert "bfloat16" in rows["gradients"]


def test_autocast_leaves_a_loss_of_one_s_own_inside(job):
    """The logits [32, 512] in float32 for logsumexp, whose input and result backward keeps."""
    spec = ModelSpec(reference=job, dtype="float32")
    plain = simulate(spec, StepSpec()).worst
    mixed = simulate(spec, StepSpec(autocast="bfloat16"))
    saved = next(row["bytes"] for row in dtype_rows(mixed) if row["what"] == "saved activations")
    assert saved["bfloat16"] > 2 * (64 * 512 + 64 * 64)  # the casts of both weights, at least
    assert mixed.worst.steady_bytes == plain.steady_bytes
    assert any("around forward and loss" in sentence for sentence in mixed.how.assumptions)


def test_the_command_line(job, capsys):
    flags = ["--precision", "fp16-mixed", "--grad-accum", "3", "--max-grad-norm", "1"]
    assert main(["estimate", job, *flags, "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {row["what"] for row in record["dtypes"]} >= {"weights", "gradients", "optimizer states"}
    assert record["options"]["autocast"] == {"value": "fp16", "from": "command line (--precision)"}
    assert [phase["phase"] for phase in record["ranks"][0]["phases"][:6]] == [
        "load", "forward", "backward", "forward", "backward", "optimizer",
    ]  # fmt: skip
    assert any("GradScaler" in sentence for sentence in record["how"]["assumptions"])
    assert main(["estimate", job, "--precision", "bf16-mixed", "--master-weights"]) == 0
    printed = capsys.readouterr().out
    assert "fp32 weights, bf16 autocast" in printed and "Dtypes" in printed
    assert main(["estimate", job, "--precision", "bf16", "--gpu", "t4"]) == 1
    assert "compute capability 7.5 < 8.0" in capsys.readouterr().err
    assert main(["estimate", job, "--implementation", "in-backward", "--max-grad-norm", "1"]) == 1
