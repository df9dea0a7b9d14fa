"""Autocast against reality: bytes alive in a real CPU run under CUDA's lists, to the byte."""

import pytest
import torch
from accelerate.utils.operations import convert_outputs_to_fp32

from metapeak.tracer.capture import record_training_step
from metapeak.tracer.training_loop import TrainingLoop
from tests.agreement.cpu_oracle import run_on_cpu
from tests.agreement.cuda_lists_on_cpu import cuda_lists_on_cpu
from tests.agreement.families import FAMILIES


def foreach_adamw(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


BY_DEFAULT = ("gpt2", "llama", "bert", "t5", "vit")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.name, marks=() if family.name in BY_DEFAULT else pytest.mark.slow)
        for family in FAMILIES
    ],
)
def test_live_bytes_equal_a_real_cpu_run_under_cuda_s_lists(family):
    model = family.build("cpu")
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype=torch.bfloat16)(model.forward))
    with cuda_lists_on_cpu():
        cpu = run_on_cpu(model, family.batch(), foreach_adamw)
    loop = TrainingLoop(autocast=torch.bfloat16)
    graph, _ = record_training_step(family.build("meta"), family.batch(), foreach_adamw, loop=loop)
    phases = {(phase.iteration, phase.phase): phase for phase in graph.liveness().phases() if phase.iteration}
    assert {key: phase.end_bytes for key, phase in phases.items()} == cpu.ends
    assert {key: phase.peak_bytes for key, phase in phases.items()} == {key: cpu.peak(key) for key in phases}
