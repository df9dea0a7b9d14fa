"""DeepSpeed on the phantom GPU holds what it holds on two real CPU processes, to the byte."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from metapeak.strategies import simulate_options
from metapeak.tracer.liveness import Category, Phase
from tests.strategies.parallel.test_sharded_steps import CONFIG

pytest.importorskip("deepspeed")
SCRIPT = Path(__file__).with_name("deepspeed_ranks.py")
BARE = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}


def on_real_ranks(folder, zero):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, str(SCRIPT), str(folder), json.dumps(zero)]
    ranks = [
        subprocess.Popen([*command, rank, port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), outputs[0][1][-2000:]
    return json.loads(next(line for line in outputs[0][0].splitlines() if line.startswith("HELD"))[5:])


def on_the_phantom_gpu(folder, zero):
    options = {name: value for name, value in zero.items() if name != "stage"}
    step = {"seq_len": 16, "batch_size": 2, "precision": "bf16-mixed", "gpus": 2, "implementation": "foreach"}
    simulation = simulate_options(str(folder), {**step, "zero_stage": zero["stage"], **options})
    liveness = simulation.worst.liveness
    counted = (liveness.nbytes > 64) & ~np.isin(liveness.category, [Category.INPUT, Category.WORKSPACE])
    forwards = [(liveness.op_phase == Phase.FORWARD) & (liveness.op_iteration == number) for number in (1, 2)]
    nexts = [*(int(forward.argmax()) for forward in forwards), liveness.num_ops]
    return [int(liveness.nbytes[counted & (liveness.birth < at) & (at < liveness.death)].sum()) for at in nexts]


CASES = {"0": {"stage": 0}, "1": {"stage": 1}, "2": {"stage": 2}, "3": {"stage": 3}, "bare": {"stage": 3, **BARE}}


@pytest.mark.slow
@pytest.mark.parametrize("zero", CASES.values(), ids=CASES)
def test_between_steps_rank_0_holds_the_same(tmp_path, zero):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if zero["stage"]:
        zero = zero | {"reduce_bucket_size": 5000}
    assert on_the_phantom_gpu(tmp_path, zero) == on_real_ranks(tmp_path, zero)
