"""`serve` against start-up lines of vLLM that others published (serving_receipts.json; every row names its source).

What each row is judged on is in the row, and why not on more in its note; `within` has the row's own tolerances, where
its note has the gap. Rows whose GPU or version the source does not name are judged on what does not depend on them.

Tolerances: weights are printed to two decimals of a GiB, 0.2 % of the smallest row. Activations are the engine's own
difference of two readings of the driver or of torch around its profile run, so they carry what that run leaves cached,
and what its kernels of that version take: seven lines lie 8 % under to 8 % over the traced prefill.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from metapeak.strategies.serving import ServingSpec, serve
from metapeak.tracer.gpus import find_gpu, gpu_of_memory
from metapeak.tracer.simulation import Verdict
from metapeak.tracer.spec import ModelSpec

ROWS = json.loads((Path(__file__).parent / "serving_receipts.json").read_text(encoding="utf-8"))
TOLERANCES = {"weights": 0.002, "tokens": 0.03, "kv_cache": 0.03, "activations": 0.081}
# The default run takes a row of every kind; the others are of the same kinds or of large models.
QUICK = {"opt125m", "r1-distill-qwen14b-2x4090", "mm-8b-h100-full", "qwen25-7b-4bit-rtx4060", "llama-8b-class-47gib"}


def gpu_of(row):
    gpu = find_gpu(row["gpu"]) if "gpu" in row else gpu_of_memory("80GiB")
    return replace(gpu, usable_bytes=row["gpu_total_bytes"]) if "gpu_total_bytes" in row else gpu


def reference_of(row, folder):
    if "config" not in row:
        return row["model"]
    from metapeak.tracer.models import locate_model

    config = locate_model(ModelSpec(reference=row["model"])).config_dict | row["config"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def test_every_judge_is_one_that_judges():
    known = {*TOLERANCES, "token", "does_not_fit"}
    assert all(row["judge"] and set(row["judge"]) <= known for row in ROWS)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row["id"], marks=[] if row["id"] in QUICK else pytest.mark.slow) for row in ROWS]
)
def test_serve_agrees_with_the_start_up_line(row, tmp_path):
    served = serve(reference_of(row, tmp_path), ServingSpec(engine="vllm", **row["settings"]), gpu=gpu_of(row))
    worst, judge, within = served.worst, row["judge"], TOLERANCES | row.get("within", {})
    if "weights" in judge:
        assert worst.weights_bytes == pytest.approx(row["weights_bytes"], rel=within["weights"])
    if "token" in judge:
        assert worst.layout.bytes_per_token == row["kv_bytes_per_token"]
    if "tokens" in judge:
        assert served.kv_tokens == pytest.approx(row["kv_tokens"], rel=within["tokens"])
    if "kv_cache" in judge:
        assert worst.kv_cache_bytes == pytest.approx(row["kv_cache_bytes"], rel=within["kv_cache"])
    if "activations" in judge:
        assert served.prefill_activation_bytes == pytest.approx(row["activation_bytes"], rel=within["activations"])
    if "does_not_fit" in judge:
        assert row["kv_cache_bytes"] < 0
        assert served.kv_tokens == 0
        assert served.fit.verdict is Verdict.DOES_NOT_FIT
