"""Seconds of a plan over more than 10,000 layouts.

    python tests/benchmarks/bench_plan.py [--model meta-llama/Llama-3.1-8B] [--jobs 2]

Wanted: under 20 s on two cores. With --jobs 1 the seconds of the processor are those of all the work.
"""

import argparse
import time

from metapeak.strategies.planning.candidates import Open
from metapeak.strategies.planning.planner import gpus_of, plan
from metapeak.strategies.settings import options_of
from metapeak.tracer.instances import all_instances


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--top", type=int, default=3)
    arguments = parser.parse_args()
    started = time.process_time()
    found = plan(
        arguments.model,
        [options_of({"seq_len": 4096, "precision": "bf16-mixed"}, "call")],
        gpus_of("h100-80gb,a100-80gb"),
        Open(gpus=[8, 16, 32, 64]),
        instances=all_instances(),
        tokens_per_batch=1 << 22,
        top=arguments.top,
        seconds=600,
        jobs=arguments.jobs,
    )
    out = sum(found.excluded.values())
    print(
        f"{found.candidates:,} layouts in {found.seconds:.1f} s with {arguments.jobs} processes "
        f"({time.process_time() - started:.1f} s of this one's processor); {out:,} left out by rule, "
        f"{found.simulated} simulated, {len(found.found)} shown"
    )


if __name__ == "__main__":
    main()
