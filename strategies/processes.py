"""Calls over processes: the cores of this machine, or a cluster through joblib's backends.

What it changes: nothing; every call returns what it would return here.
Not modelled: nothing.
Sources: joblib's documentation of `parallel_config` and of its Dask and Ray backends.

Note [Why processes start afresh]
    torch refuses to run a backward in a process that was forked from one that ran a backward, so workers are forked
    from a server that has imported and run nothing (`forkserver`), or start from nothing where there is none.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

# What a worker needs for any trace; imported once, by the server that workers are forked from.
_PRELOADED = ("metapeak.strategies.request", "metapeak.tracer.capture", "transformers.models.auto.modeling_auto")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Here:
    """Runs a call when it is submitted, in this process."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


@contextlib.contextmanager
def workers(jobs: int) -> Iterator[Here | ProcessPoolExecutor]:
    """Something to `submit` calls to, that are picklable and run in `jobs` processes; in this one for one job."""
    if jobs <= 1:
        yield Here()
        return
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if hasattr(context, "set_forkserver_preload"):
        context.set_forkserver_preload(list(_PRELOADED))
    pool = ProcessPoolExecutor(jobs, mp_context=context)
    try:
        yield pool
    finally:
        running = list(pool._processes.values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()  # nobody waits for what they are at
