"""Speed of a trace, as ratios within one run (these depend on the machine far less than seconds do).

    python tests/benchmarks/bench_trace.py [--model Qwen/Qwen3-8B] [--batch-size 1] [--seq-len 2048] [--runs 3]

Three programs, each a process of its own, the fastest of `--runs` counts:
  import      importing torch, transformers and the model's class, which every estimate has to do
  metapeak    from a built model to the finished report: two iterations traced, liveness, JSON and text
  MemTracker  torch's own tracker under FakeTensorMode on the same model and batch, one iteration
Wanted: metapeak / import <= 1 and MemTracker / metapeak >= 10.
"""

import argparse
import json
import subprocess
import sys

IMPORT = """
import json, sys, time
started = time.perf_counter()
import torch
import transformers
transformers.AutoModelForCausalLM
getattr(transformers, sys.argv[4])
print(json.dumps({"seconds": time.perf_counter() - started}))
"""

METAPEAK = """
import io, json, sys, time
import torch, transformers
from metapeak.reports.data import record_of
from metapeak.reports.summary import print_summary
from metapeak.strategies import simulate
from metapeak.tracer import StepSpec
from rich.console import Console
started = time.perf_counter()
result = simulate(sys.argv[1], StepSpec(batch_size=int(sys.argv[2]), seq_len=int(sys.argv[3])))
print_summary(result, Console(file=io.StringIO()))
json.dumps(record_of(result))
total = time.perf_counter() - started
built = result.how.seconds["import"] + result.how.seconds["build"]
print(json.dumps({"seconds": total - built, "operations": result.graph.num_ops,
                  "peak_bytes": result.worst.requested_bytes, "architecture": result.model.architecture}))
"""

MEMTRACKER = """
import json, sys, time
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from metapeak.tracer import ModelSpec, build_model, resolve_model
built = build_model(resolve_model(ModelSpec(reference=sys.argv[1])))
torch.set_default_dtype(built.dtype)
with FakeTensorMode():
    model = type(built)(built.config).train()
    ids = torch.zeros(int(sys.argv[2]), int(sys.argv[3]), dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tracker = MemTracker()
    tracker.track_external(model, optimizer, ids)
    started = time.perf_counter()
    with tracker:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(json.dumps({"seconds": time.perf_counter() - started}))
"""


def run(program: str, *arguments: str) -> dict:
    """What the program prints: JSON with its `seconds`."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def fastest(count: int, program: str, *arguments: str) -> dict:
    return min((run(program, *arguments) for _ in range(count)), key=lambda result: result["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    parser.add_argument("--batch-size", default="1")
    parser.add_argument("--seq-len", default="2048")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    step = (arguments.model, arguments.batch_size, arguments.seq_len)
    ours = fastest(arguments.runs, METAPEAK, *step)
    imports = fastest(arguments.runs, IMPORT, *step, ours["architecture"])
    tracker = fastest(1, MEMTRACKER, *step)
    print(f"{arguments.model}, batch {arguments.batch_size} x {arguments.seq_len}: {ours['operations']:,} operations")
    print(f"import     {imports['seconds']:8.2f} s")
    print(f"metapeak   {ours['seconds']:8.2f} s   metapeak / import     {ours['seconds'] / imports['seconds']:6.2f}")
    print(f"MemTracker {tracker['seconds']:8.2f} s   MemTracker / metapeak {tracker['seconds'] / ours['seconds']:6.2f}")


if __name__ == "__main__":
    main()
