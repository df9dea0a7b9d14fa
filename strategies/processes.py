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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from metapeak.tracer.errors import InputError

# Those of joblib that run processes: a trace changes global state of torch, so threads cannot share it.
BACKENDS = ("loky", "dask", "ray")
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


def results(
    function: Callable[..., Any], calls: Sequence[Sequence[Any]], *, jobs: int, backend: str | None = None
) -> Iterable[Any]:
    """What `function` returns for the arguments of each call, in order, as it comes.

    `backend` is joblib's; dask takes the cluster that DASK_SCHEDULER_ADDRESS or a Client names and starts a local one
    without, ray the one that RAY_ADDRESS names. None: processes of this machine. Raises InputError for a backend whose
    package is not installed.
    """
    if backend is None:
        with workers(jobs) as pool:
            for future in [pool.submit(function, *arguments) for arguments in calls]:
                yield future.result()
        return
    joblib = _imported("joblib", backend)
    many = -1 if backend in ("dask", "ray") else jobs
    with _cluster(backend, jobs), joblib.parallel_config(backend=backend, n_jobs=many):
        yield from joblib.Parallel()(joblib.delayed(function)(*arguments) for arguments in calls)


@contextlib.contextmanager
def _cluster(backend: str, jobs: int) -> Iterator[None]:
    """What joblib's backend needs before it can be named."""
    if backend == "ray":
        _imported("ray.util.joblib", backend).register_ray()
    if backend != "dask":
        yield
        return
    distributed = _imported("distributed", backend)
    try:
        distributed.get_client()
    except ValueError:  # nobody made one
        local = {} if os.environ.get("DASK_SCHEDULER_ADDRESS") else {"n_workers": jobs, "threads_per_worker": 1}
        with distributed.Client(**local):
            yield
    else:
        yield


def _imported(module: str, backend: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise InputError(f"--backend {backend} needs {package}: pip install 'metapeak[cluster]' {package}") from error
