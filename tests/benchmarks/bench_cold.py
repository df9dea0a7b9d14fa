"""A cold answer beside the imports that any answer needs, as ratios in one run.

    python tests/benchmarks/bench_cold.py [--repeat 3]

Every line is a new process. `imports` brings in torch, transformers and the model's class, `torch, transformers` only
the two packages, which load most of themselves later. Wanted: an 8B model at most 1.25 times, Llama-3.1-405B at most
1.5 times the imports; and an answer from the cache at most 0.4 s.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time

IMPORTS = {
    "torch, transformers": "import torch, transformers",
    "imports": "import torch, transformers; from transformers import LlamaForCausalLM",
}
COMMANDS = {
    "8B": ["meta-llama/Llama-3.1-8B"],
    "405B": ["meta-llama/Llama-3.1-405B"],
    "405B, FSDP 256 x TP 8": ["meta-llama/Llama-3.1-405B", "--dp-shard", "256", "--tp", "8", "--precision", "bf16"],
}


def measured(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """(seconds, seconds of processor) of a process."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - started, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="the least of so many runs counts")
    arguments = parser.parse_args()
    estimate = [sys.executable, "-m", "metapeak.reports.cli", "estimate"]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "METAPEAK_CACHE": cache}
        lines = {name: [sys.executable, "-c", code] for name, code in IMPORTS.items()}
        lines.update({name: [*estimate, *command, "--no-cache"] for name, command in COMMANDS.items()})
        best = {
            name: min(measured(command, environment) for _ in range(arguments.repeat))
            for name, command in lines.items()
        }
        cached = [*estimate, *COMMANDS["8B"]]
        measured(cached, environment)
        best["8B from the cache"] = min(measured(cached, environment) for _ in range(arguments.repeat))
    for name, (seconds, processor) in best.items():
        ratios = [f"{processor / best[other][1]:5.2f} x {other}" for other in IMPORTS]
        print(f"{name:<24}{seconds:7.2f} s {processor:7.2f} s of processor, {', '.join(ratios)}")


if __name__ == "__main__":
    main()
