"""The trace against reality: bytes alive in a real CPU run, to the byte."""

import pytest
import torch

from metapeak.tracer.capture import record_training_step
from tests.agreement.cpu_oracle import run_on_cpu
from tests.agreement.families import FAMILIES

# Operators that CPU and CUDA run at different granularity, by family: the phases whose peak is then not compared.
# None of the families needs one at fp32 with eager attention.
DIFFERENT_GRANULARITY: dict[str, dict[str, set[str]]] = {}


def foreach_adamw(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_live_bytes_equal_a_real_cpu_run(family):
    cpu = run_on_cpu(family.build("cpu"), family.batch(), foreach_adamw)
    graph, _assumptions = record_training_step(family.build("meta"), family.batch(), foreach_adamw)
    phases = {(phase.iteration, phase.phase): phase for phase in graph.liveness().phases() if phase.iteration}

    assert list(cpu.ends) == list(phases)
    assert {key: phase.end_bytes for key, phase in phases.items()} == cpu.ends
    compared = [key for key in phases if key[1] not in DIFFERENT_GRANULARITY.get(family.name, {})]
    assert {key: phases[key].peak_bytes for key in compared} == {key: cpu.peak(key) for key in compared}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_graph_of_a_real_model_holds_together(family):
    graph, _ = record_training_step(family.build("meta"), family.batch(), foreach_adamw, iterations=1)
    graph.lint()
