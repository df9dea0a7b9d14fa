"""Points a second of a step's peak as a function of batch and length, and what one trace costs beside it.

    python tests/benchmarks/bench_sizes.py [--model meta-llama/Llama-3.1-8B]

Wanted: 2,000 points a second on one core.
"""

import argparse
import time

from metapeak.strategies.lengths import Steps
from metapeak.strategies.settings import options_of, resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    model = parser.parse_args().model
    steps = Steps(model, resolve(options_of({}, "call")))
    sizes = [(2, length) for length in range(128, 4097)]
    started = time.process_time()
    steps.cover(sizes)
    covered = time.process_time() - started
    steps.peak_bytes(sizes[:1])  # what is kept between calls
    started = time.process_time()
    steps.peak_bytes(sizes)
    seconds = time.process_time() - started
    print(f"{steps.traces} traces in {covered:.1f} s of processor (imports too), {len(steps.ranges)} ranges")
    of_a_trace = covered / steps.traces / seconds * len(sizes)
    print(f"{len(sizes) / seconds:,.0f} points a second; a trace costs as much as {of_a_trace:,.0f} of them")


if __name__ == "__main__":
    main()
