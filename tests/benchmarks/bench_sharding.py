"""Seconds of a sharded step by the size of the world: a rank costs the same in any.

    python tests/benchmarks/bench_sharding.py [--model meta-llama/Llama-2-7b-hf] [--seq-len 2048]

Wanted: a world of 4,096 costs no more than one of 8; Llama-3.1-405B with dp_shard 256 and tp 8 under 20 s cold.
"""

import argparse
import time

from metapeak.strategies import simulate_options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="meta-llama/Llama-2-7b-hf")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=5, help="the least of so many runs counts")
    arguments = parser.parse_args()
    common = {"seq_len": arguments.seq_len, "checkpointing": "full", "precision": "bf16-mixed"}
    simulate_options(arguments.model, {**common, "dp_shard": 2})  # imports
    seconds = {}
    for degrees in (
        {"dp_shard": 8},
        {"dp_shard": 4096},
        {"dp_shard": 8, "tp": 8},
        {"dp_replicate": 64, "dp_shard": 64},
    ):
        runs = []
        for _ in range(arguments.repeat):
            started, processor = time.perf_counter(), time.process_time()
            simulation = simulate_options(arguments.model, {**common, **degrees})
            runs.append((time.process_time() - processor, time.perf_counter() - started))
        seconds[str(degrees)], wall = min(runs)
        print(
            f"{', '.join(f'{name} {degree}' for name, degree in degrees.items()):<32}"
            f"{wall:7.2f} s, {seconds[str(degrees)]:7.2f} s of processor, "
            f"{len(simulation.ranks)} ranks traced, worst {simulation.worst.requested_bytes:,} bytes"
        )
    few, many = seconds["{'dp_shard': 8}"], seconds["{'dp_shard': 4096}"]
    print(f"a world of 4,096 costs {many / few:.2f} of one of 8")


if __name__ == "__main__":
    main()
