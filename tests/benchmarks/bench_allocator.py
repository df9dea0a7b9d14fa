"""Speed of the caching allocator on a training step, and of replaying recorded histories.

    python tests/benchmarks/bench_allocator.py [--model Qwen/Qwen3-8B] [SNAPSHOT ...]

Wanted: a 32-layer step of 20,000 events in under 0.3 s. Ratios are printed since seconds depend on the machine: to the
trace of the same step, and to as many insertions and deletions in a sorted list of Python integers.
"""

import argparse
import bisect
import time

from metapeak.strategies import simulate
from metapeak.tracer import StepSpec
from metapeak.tracer.device.allocator_config import parse_allocator_config
from metapeak.tracer.device.replay import replay
from metapeak.tracer.device.reserve import allocation_order, reserve
from metapeak.tracer.device.snapshot_reader import read_snapshot


def best(function, rounds=5):
    """Seconds of the fastest of some rounds."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def sorted_list(events):
    """A yardstick: as many operations on a sorted list of 256 integers."""
    keys = [number << 64 for number in range(256)]
    for number in range(events // 2):
        key = (number * 7919) % 256 << 64 | number
        bisect.insort(keys, key)
        del keys[bisect.bisect_left(keys, key)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    parser.add_argument("snapshots", nargs="*", metavar="SNAPSHOT")
    arguments = parser.parse_args()
    simulation = simulate(arguments.model, StepSpec())
    trace = simulation.how.seconds["trace"]
    liveness = simulation.worst.liveness
    events = len(allocation_order(liveness)[0])
    yardstick = best(lambda: sorted_list(events))
    print(f"{arguments.model}: {liveness.num_ops:,} operations, {events:,} allocations and frees; trace {trace:.2f} s")
    for text in ("", "expandable_segments:True"):
        config = parse_allocator_config(text)
        seconds = best(lambda config=config: reserve(liveness, config))
        print(
            f"  {text or 'default settings':<26} {seconds:.3f} s, {seconds / events * 20_000:.3f} s for 20,000 events; "
            f"{trace / seconds:.0f} times faster than the trace, {seconds / yardstick:.1f} times the sorted list"
        )
    for path in arguments.snapshots:
        snapshot = read_snapshot(path)
        for history in snapshot.recorded:
            seconds = best(lambda history=history, config=snapshot.config: replay(history, config), rounds=3)
            print(f"  {path}: {len(history.entries):,} entries unwound, replayed and compared in {seconds:.3f} s")


if __name__ == "__main__":
    main()
