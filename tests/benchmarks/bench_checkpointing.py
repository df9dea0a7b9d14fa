"""Speed of checkpointing policies on an 80-layer model, after its trace.

    python tests/benchmarks/bench_checkpointing.py [--model meta-llama/Llama-3.1-70B]

Wanted: 1,000 policies in under one second, the plan under a budget in under five; ratios to the trace are printed since
seconds depend on the machine.
"""

import argparse
import time

import numpy as np
import torch

from metapeak.strategies.checkpoint_planner import least_recompute
from metapeak.strategies.checkpoint_policies import EveryBlock
from metapeak.strategies.checkpoint_table import checkpoint_table
from metapeak.strategies.recompute import checkpointed
from metapeak.strategies.regions import regions_of
from metapeak.tracer import ModelSpec, StepSpec, build_model, make_batch, record_training_step, resolve_model
from metapeak.tracer.flops import operation_flops


def timed(what, function):
    started = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - started
    print(f"{what:<40} {seconds:8.3f} s")
    return result, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-70B")
    arguments = parser.parse_args()
    model = build_model(resolve_model(ModelSpec(reference=arguments.model)))
    batch = make_batch(model, "causal-lm", StepSpec(batch_size=4, seq_len=4096))
    (graph, _), trace = timed(
        "trace, two iterations",
        lambda: record_training_step(
            model, batch.tensors, lambda p: torch.optim.AdamW(p, foreach=True), decouple_saves=True
        ),
    )
    blocks = EveryBlock().modules(graph)
    candidates = [(name, regions_of(graph, [name])) for name in blocks]
    timed("one policy by the rewrite", lambda: checkpointed(graph, regions_of(graph, blocks)))
    table, build = timed("table of changes", lambda: checkpoint_table(graph, candidates))
    choices = np.random.default_rng(0).random((1000, len(blocks))) < 0.5
    _, score = timed(f"1,000 policies of {len(blocks)} blocks", lambda: table.peaks(choices))
    flops = operation_flops(graph)
    costs = np.array(
        [sum(int(flops[r.begin : r.stop].sum()) for r in regions) for _, regions in candidates], dtype=float
    )
    every = table.peaks(np.array([np.zeros(len(blocks), bool), np.ones(len(blocks), bool)]))
    _, solve = timed("plan half way between none and full", lambda: least_recompute(table, costs, int(every.mean())))
    print(f"trace / 1,000 policies {trace / (build + score):.1f}, trace / plan {trace / solve:.1f}")


if __name__ == "__main__":
    main()
