"""Many receipts at once: grouped so that steps share traces, spread over processes, every result kept as it comes.

A run that is interrupted returns what is done; the next one reads that from the cache on disk, where each group of
receipts lies under a hash of the receipts, this program's code and every installed package.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from metapeak.reports.receipts import Receipt
from metapeak.reports.validation import Prediction, predict
from metapeak.strategies.cached import installed_packages, own_code
from metapeak.tracer.disk_cache import CacheProblem, DiskCache

NOT_RUN = "not run: interrupted before its turn"
Group = list[list[Receipt]]


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Predictions in the order of the receipts; those that an interruption left out are refused with NOT_RUN."""

    predictions: list[Prediction]
    interrupted: bool = False
    from_cache: int = 0


def validate(
    receipts: Sequence[Receipt],
    progress: Callable[[str], None] = lambda what: None,
    *,
    jobs: int = 1,
    cache: DiskCache | None = None,
) -> Validation:
    """Every receipt predicted or refused. `jobs` 1 stays in this process. Ctrl-C ends the run with what is done."""
    groups = trace_groups(receipts)
    done: dict[str, Prediction] = {}
    for group in groups:
        done |= {one.receipt.id: one for one in _read(cache, group)}
    from_cache, left = len(done), [group for group in groups if group[0][0].id not in done]
    interrupted = False
    try:
        results = _in_this_process(left) if jobs == 1 or len(left) < 2 else _in_processes(left, jobs)
        with contextlib.closing(results):
            for group, predictions in results:
                done |= {one.receipt.id: one for one in predictions}
                _keep(cache, group, predictions)
                progress(f"{len(done)} of {len(receipts)}, last {group[0][0].id}")
    except KeyboardInterrupt:
        interrupted = True
    missing = {receipt.id: Prediction(receipt=receipt, refused=NOT_RUN) for receipt in receipts}
    return Validation(
        predictions=[(missing | done)[receipt.id] for receipt in receipts],
        interrupted=interrupted,
        from_cache=from_cache,
    )


def trace_groups(receipts: Sequence[Receipt]) -> list[Group]:
    """Receipts by what their traces have in common: everything but the liveness strategies; inside a group, lists of
    those that differ only in their metric (or in being compiled, beside which the eager step is run).
    """
    groups: dict[str, dict[str, list[Receipt]]] = {}
    for receipt in receipts:
        options = {name: value for name, value in receipt.options.items() if name != "compile"}
        step = _key(receipt.model, receipt.definition, receipt.fields.get("definition_key"), receipt.gpu, options)
        trace = {name: value for name, value in options.items() if name != "checkpointing"}
        key = _key(receipt.model, receipt.definition, receipt.fields.get("definition_key"), receipt.gpu, trace)
        groups.setdefault(key, {}).setdefault(step, []).append(receipt)
    return [list(steps.values()) for steps in groups.values()]


def _key(*parts: Any) -> str:
    return json.dumps(parts, sort_keys=True)


def _in_this_process(groups: Sequence[Group]) -> Iterator[tuple[Group, list[Prediction]]]:
    for group in groups:
        yield group, _predict_group(group)


def _predict_group(group: Group) -> list[Prediction]:
    traces: dict = {}
    return [one for step in group for one in predict(step, traces)]


def _in_processes(groups: Sequence[Group], jobs: int) -> Iterator[tuple[Group, list[Prediction]]]:
    """As they finish. Workers ignore Ctrl-C, which the parent answers by ending them."""
    import multiprocessing

    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)
    try:
        longest_first = sorted(groups, key=_is_sharded, reverse=True)
        waiting: dict[Future, Group] = {pool.submit(_predict_group, group): group for group in longest_first}
        while waiting:
            finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                group = waiting.pop(future)
                try:
                    yield group, future.result()
                except BrokenProcessPool:
                    reason = "its process ended without a word, most likely for want of memory; try --jobs 1"
                    yield group, [Prediction(receipt=one, refused=reason) for step in group for one in step]
    finally:
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()


def _is_sharded(group: Group) -> bool:
    """Whether its steps run on several ranks: such traces take three to ten times as long."""
    return (group[0][0].options.get("parallel") or {}).get("engine", "none") != "none"


def _start_worker() -> None:
    from metapeak.reports.commands.base import quiet_transformers

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quiet_transformers()
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (packages that print at import; the report is the parent's)
    import torch

    torch.set_num_threads(1)


# -- results on disk ---------------------------------------------------------------------------------------------------


def _cache_key(group: Group) -> str:
    parts = [[dict(one.fields) for step in group for one in step], sys.version, installed_packages(), own_code()]
    return hashlib.sha256(_key("receipts", *parts).encode()).hexdigest()


def _read(cache: DiskCache | None, group: Group) -> list[Prediction]:
    content = cache.read(_cache_key(group)) if cache is not None else None
    if content is None:
        return []
    kept = json.loads(content)
    return [
        Prediction(
            receipt=one,
            predicted_bytes=kept[one.id]["predicted_bytes"],
            seconds=kept[one.id]["seconds"],
            refused=kept[one.id]["refused"],
            predicted_range=_pair(kept[one.id]["predicted_range"]),
        )
        for step in group
        for one in step
    ]


def _pair(values: Sequence[int] | None) -> tuple[int, int] | None:
    return None if values is None else (values[0], values[1])


def _keep(cache: DiskCache | None, group: Group, predictions: Sequence[Prediction]) -> None:
    if cache is None:
        return
    names = ("predicted_bytes", "seconds", "refused", "predicted_range")
    kept = {one.receipt.id: {name: getattr(one, name) for name in names} for one in predictions}
    with contextlib.suppress(CacheProblem):  # the answer itself is not affected
        cache.write(_cache_key(group), json.dumps(kept).encode(), f"receipts {', '.join(kept)}")
