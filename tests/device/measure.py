"""Measure real training steps on a machine with a CUDA GPU and write receipts.

    python -m tests.device.measure --out receipts.jsonl [--minutes 8] [--snapshots FOLDER] [--only TEXT] [--device cpu]

Each case runs in a process of its own (run_case.py), the most informative first, until the time is used up. Models have
the catalogue's configs and random weights; nothing is downloaded and no setting of the GPU is touched. A case that the
GPU has no memory for, or whose package is missing, is written with its reason in `failed`. Lines have the schema of
`metapeak validate`, so that the file can be validated as it is. On the CPU the same program runs the smallest cases
with the same record (metric `rss`): a smoke test.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NO_PARALLEL = {"engine": "none", "dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1}
# Slowest case seen to be worth starting with so much time left, seconds: import, build, three steps.
SHORTEST_CASE_SECONDS = 20


def case(model: str, batch_size: int, seq_len: int | None, **options: Any) -> dict[str, Any]:
    """One case: a model of the catalogue and the options of a receipt; what is not said is the contract's default."""
    defaults = {
        "method": "full",
        "weights_dtype": "bf16",
        "autocast": None,
        "optimizer": {"name": "adamw", "implementation": "foreach"},
        "checkpointing": "none",
        "attention": "sdpa",
        "loss": "eager",
        "grad_accum": 1,
        "compile": False,
        "parallel": NO_PARALLEL,
        "preset": "none",
    }
    lengths = {"batch_size": batch_size} | ({"seq_len": seq_len} if seq_len else {})
    return {"model": model, "options": {**lengths, **defaults, **options}}


QWEN, GPT2, BERT, T5, VIT = (
    "Qwen/Qwen3-0.6B",
    "openai-community/gpt2",
    "google-bert/bert-base-uncased",
    "google-t5/t5-small",
    "google/vit-base-patch16-224",
)
MIXED = {"weights_dtype": "fp32", "autocast": "bf16"}
LORA = {"method": "lora", "lora": {"rank": 16, "targets": ["q_proj", "v_proj"], "adapter_dtype": "fp32"}}
NF4 = {"quantization": {"type": "nf4", "double_quant": True, "compute_dtype": "bf16", "kbit_prepare": False}}
EXPANDABLE = {"allocator": "expandable_segments:True"}


def matrix() -> list[dict[str, Any]]:
    """Every case, the most informative first."""

    def optimizer(name: str, implementation: str | None = None) -> dict[str, Any]:
        return {"optimizer": {"name": name} | ({"implementation": implementation} if implementation else {})}

    return [
        case(QWEN, 4, 1024),
        case(QWEN, 4, 1024, checkpointing="full"),
        case(QWEN, 4, 1024, **MIXED),
        case(QWEN, 4, 1024, **LORA, checkpointing="full"),
        case(QWEN, 4, 1024, **{**LORA, "method": "qlora"}, **NF4, checkpointing="full"),
        case(GPT2, 4, 512, weights_dtype="fp32"),
        case(QWEN, 4, 1024, **optimizer("adamw", "fused")),
        case(BERT, 8, 256, weights_dtype="fp32"),
        case(QWEN, 4, 1024, **EXPANDABLE),
        case(QWEN, 4, 1024, **MIXED, checkpointing="full"),
        case(QWEN, 4, 1024, **optimizer("adamw8bit")),
        case(T5, 8, 256, weights_dtype="fp32"),
        case(VIT, 16, None, weights_dtype="fp32"),
        case(QWEN, 4, 1024, attention="eager"),
        case(QWEN, 4, 1024, **LORA),
        case(QWEN, 4, 1024, **optimizer("adamw", "for-loop")),
        case(QWEN, 4, 1024, **optimizer("sgd")),
        case(QWEN, 2, 4096, checkpointing="full"),
        case(QWEN, 2, 4096, checkpointing="full", **EXPANDABLE),
        case(GPT2, 4, 512, **{**MIXED, "autocast": "fp16"}),
        case(QWEN, 1, 1024),
        case(QWEN, 4, 1024, weights_dtype="fp32"),
        case(QWEN, 4, 1024, grad_accum=4),
        case(QWEN, 4, 1024, grad_clip=1.0),
        case(GPT2, 4, 512, checkpointing="full", weights_dtype="fp32"),
        case(BERT, 8, 256, **MIXED),
    ]


SMOKE = [case(GPT2, 1, 16, weights_dtype="fp32"), case(GPT2, 1, 16, checkpointing="full", weights_dtype="fp32")]


def measure(
    cases: list[dict[str, Any]], device: str, minutes: float, snapshots: Path | None
) -> Iterator[dict[str, Any]]:
    """Receipts of the cases, as far as the time goes."""
    started = time.monotonic()
    for number, one in enumerate(cases, 1):
        left = 60 * minutes - (time.monotonic() - started)
        if left < SHORTEST_CASE_SECONDS:
            print(f"time is used up: {len(cases) - number + 1} cases not run", file=sys.stderr)
            return
        print(f"{number} of {len(cases)}: {describe(one)}", file=sys.stderr)
        yield from receipts_of(one, run(one, device, left, snapshots), number)


def run(one: dict[str, Any], device: str, seconds: float, snapshots: Path | None) -> dict[str, Any]:
    """What run_case.py measured in a process of its own, or {"failed": reason}."""
    allocator = one["options"].get("allocator")
    environment = {**os.environ} | ({"PYTORCH_CUDA_ALLOC_CONF": allocator} if allocator else {})
    job = {**one, "device": device, "snapshot": str(snapshots / f"{slug(one)}.pickle") if snapshots else None}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.device.run_case", json.dumps(job)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than the {seconds:.0f} s that were left"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def receipts_of(one: dict[str, Any], result: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """A line a metric, in the schema of receipts."""
    common = {
        "source": f"tests/device/measure.py, {datetime.date.today().isoformat()}",
        "model": one["model"],
        "task": result.get("task"),
        "options": {**one["options"], "framework_versions": result.get("versions", {})},
        "rank": "rank0",
        "rounding_bytes": 0,
        "baseline_excluded_bytes": False,
        "gpu": result.get("gpu"),
        "tier": "A",
        "mechanism": mechanisms(one["options"]),
        "definition": "transformers",
    }
    if "failed" in result:
        yield {"id": f"measured-{number:03}-{slug(one)}", **common, "failed": result["failed"]}
        return
    for metric, nbytes in result["bytes"].items():
        yield {
            "id": f"measured-{number:03}-{slug(one)}-{metric}", **common, "metric": metric, "measured_bytes": nbytes,
            **({"context_bytes": result["context_bytes"]} if metric == "nvml" else {}),
        }  # fmt: skip


def mechanisms(options: dict[str, Any]) -> list[str]:
    """What decides the number, in the words of the receipts."""
    found = {
        "lora": options["method"] in ("lora", "qlora"),
        "quantization": "quantization" in options,
        "checkpoint": options["checkpointing"] != "none",
        "precision": bool(options["autocast"]),
        "optimizer-step": options["method"] == "full",
        "attention": options["attention"] != "sdpa",
        "optimizer-state": options["optimizer"]["name"] not in ("adamw", "sgd"),
    }
    return [name for name, present in found.items() if present] or ["activations"]


def describe(one: dict[str, Any]) -> str:
    options = one["options"]
    words = [options["method"], options["weights_dtype"], options["autocast"] and f"autocast {options['autocast']}"]
    words += [*options["optimizer"].values(), options["checkpointing"], options["attention"], options.get("allocator")]
    words += [f"accum {options['grad_accum']}" * (options["grad_accum"] > 1), "clip" * ("grad_clip" in options)]
    return f"{one['model']} {options['batch_size']} x {options.get('seq_len')}: " + ", ".join(
        str(w) for w in words if w
    )


def slug(one: dict[str, Any]) -> str:
    """A name for files and ids, of the words that tell the case from the others."""
    text = describe(one).split("/")[-1].replace(":True", "")
    return "-".join("".join(letter if letter.isalnum() else " " for letter in text).split()).lower()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.device.measure", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, metavar="FILE", help="receipts are appended here, a line each")
    parser.add_argument("--minutes", type=float, default=8, help="time to use; default 8")
    parser.add_argument("--snapshots", metavar="FOLDER", type=Path, help="write a memory snapshot a case")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name holds this")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args(argv)
    if arguments.snapshots:
        arguments.snapshots.mkdir(parents=True, exist_ok=True)
    cases = [one for one in (matrix() if arguments.device == "cuda" else SMOKE) if arguments.only in slug(one)]
    if not cases:
        print(f"no case holds '{arguments.only}'", file=sys.stderr)
        return 1
    with open(arguments.out, "a", encoding="utf-8") as out:
        for receipt in measure(cases, arguments.device, arguments.minutes, arguments.snapshots):
            out.write(json.dumps(receipt) + "\n")
            out.flush()  # whatever happens later, this is measured
    return 0


if __name__ == "__main__":
    sys.exit(main())
