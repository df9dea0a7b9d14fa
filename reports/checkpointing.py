"""The report of `metapeak checkpointing`: policies, layers, the frontier, the plan; as text and as a record."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from metapeak.reports.data import SCHEMA_VERSION, model_record, options_record
from metapeak.reports.sizes import gib, size
from metapeak.reports.summary import NARROW, print_head, print_sentences
from metapeak.strategies.checkpoint_study import CheckpointStudy, LayerResult, PolicyResult
from metapeak.tracer.simulation import RankResult

_BARS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 30


def study_record(study: CheckpointStudy, verified: dict[str, RankResult] | None = None) -> dict[str, Any]:
    """The JSON-able record of the contract."""
    plan = None
    if study.plan is not None:
        plan = study.plan.record(study.simulation.model.id)
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model_record(study.simulation),
        "options": options_record(study.simulation),
        "policies": [_policy_record(result, verified) for result in study.policies],
        "layers": [
            {
                "layer": layer.layer,
                "kind": layer.kind,
                "saved_bytes": layer.saved_bytes,
                "kept_bytes_if_checkpointed": layer.kept_bytes_if_checkpointed,
                "recompute_flops": layer.recompute_flops,
            }
            for layer in study.layers
        ],
        "frontier": [_policy_record(result, None) for result in study.frontier],
        "plan": plan,
    }


def _policy_record(result: PolicyResult, verified: dict[str, RankResult] | None) -> dict[str, Any]:
    record = {
        "policy": result.policy,
        "checkpointed": list(result.modules),
        "peak": {"requested_bytes": result.rank.requested_bytes, "allocated_bytes": result.rank.allocated_bytes},
        "peak_at": {"phase": result.rank.peak_at.phase, "op": result.rank.peak_at.op},
        "saved_bytes": result.saved_bytes,
        "host_bytes": result.host_bytes,
        "recompute_flops": result.recompute_flops,
        "extra_flops_percent": result.extra_flops_percent,
    }
    if verified is not None and result.policy in verified:
        record["verified_peak_bytes"] = verified[result.policy].requested_bytes
    return record


def print_study(study: CheckpointStudy, console: Console, verified: dict[str, RankResult] | None = None) -> None:
    """Print the whole report."""
    print_head(study.simulation, study.simulation.worst, console)
    console.print()
    console.print(_policies("Policies", study.policies, verified, console))
    if len({result.rank.peak_at.phase for result in study.policies}) == 1:
        phase = study.policies[0].rank.peak_at.phase
        if phase == "optimizer":
            console.print(Text("The optimizer step is the peak under every policy: checkpointing cannot lower it."))
    console.print()
    _curves(study.policies, console)
    console.print()
    console.print(_layers(study.layers, console))
    console.print()
    console.print(
        _policies("Pareto frontier: no plan has a lower peak for less recompute", study.frontier, None, console)
    )
    if study.plan is not None:
        _plan(study, console)
    print_sentences("Assumed", study.simulation.how.assumptions, console)
    print_sentences("Not modelled", study.simulation.how.not_modelled, console)


def _policies(
    title: str, results: tuple[PolicyResult, ...], verified: dict[str, RankResult] | None, console: Console
) -> Table:
    columns: dict[str, Callable[[PolicyResult], str]] = {
        "modules": lambda result: str(len(result.modules)),
        "peak GiB": lambda result: gib(result.rank.allocated_bytes),
        "in": lambda result: result.rank.peak_at.phase,
        "saved GiB": lambda result: gib(result.saved_bytes),
        "recompute TFLOP": lambda result: f"{result.recompute_flops / 1e12:.3g}",
        "of the step": lambda result: f"+{result.extra_flops_percent:.1f} %",
    }
    if any(result.host_bytes for result in results):
        columns["on host GiB"] = lambda result: gib(result.host_bytes)
    if console.width < NARROW:
        for name in ("modules", "in", "recompute TFLOP"):
            del columns[name]
    if verified:
        columns["re-traced"] = lambda result: _agreement(result, verified)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("policy", overflow="fold")
    for name in columns:
        table.add_column(name, justify="left" if name == "in" else "right", no_wrap=True)
    for result in results:
        table.add_row(result.policy, *(cell(result) for cell in columns.values()))
    return table


def _agreement(result: PolicyResult, verified: dict[str, RankResult]) -> str:
    if result.policy not in verified:
        return ""
    other = verified[result.policy]
    difference = result.rank.requested_bytes - other.requested_bytes
    return f"{gib(other.allocated_bytes)} {'equal' if difference == 0 else f'({difference:+,} B)'}"


def _layers(layers: tuple[LayerResult, ...], console: Console) -> Table:
    """Equal neighbours are one row."""
    narrow = console.width < NARROW
    table = Table(title="Layers, each alone", title_justify="left", box=None, pad_edge=False)
    table.add_column("layers", overflow="fold")
    table.add_column("saves", justify="right", no_wrap=True)
    table.add_column("keeps" if narrow else "keeps if checkpointed", justify="right", no_wrap=True)
    table.add_column("TFLOP" if narrow else "recompute TFLOP", justify="right", no_wrap=True)
    if not narrow:
        table.add_column("kind", no_wrap=True)
        table.add_column("", no_wrap=True)
    most = max((layer.saved_bytes for layer in layers), default=0)
    for first, last, layer in _runs(layers):
        name = first.layer if first is last else f"{first.layer} ... {last.layer}"
        bar = "█" * round(_BAR_WIDTH * layer.saved_bytes / most) if most else ""
        row = [name, size(layer.saved_bytes), size(layer.kept_bytes_if_checkpointed)]
        row.append(f"{layer.recompute_flops / 1e12:.3g}")
        table.add_row(*row, *([] if narrow else [layer.kind, bar]))
    return table


def _runs(layers: tuple[LayerResult, ...]) -> list[tuple[LayerResult, LayerResult, LayerResult]]:
    runs: list[tuple[LayerResult, LayerResult, LayerResult]] = []
    for layer in layers:
        if runs and _weight(runs[-1][2]) == _weight(layer):
            runs[-1] = (runs[-1][0], layer, runs[-1][2])
        else:
            runs.append((layer, layer, layer))
    return runs


def _weight(layer: LayerResult) -> tuple:
    return layer.kind, layer.saved_bytes, layer.kept_bytes_if_checkpointed, layer.recompute_flops


def _curves(policies: tuple[PolicyResult, ...], console: Console) -> None:
    """Live bytes over the operations of the last iteration, one line a policy on one scale."""
    width = max(20, min(100, console.width - 14))
    highest = max(result.rank.requested_bytes for result in policies)
    console.print(Text(f"Live bytes over the steady step, operation by operation; full height {gib(highest)} GiB"))
    for result in policies:
        liveness = result.rank.liveness
        live = liveness.live_bytes()[liveness.op_iteration == liveness.op_iteration.max()]
        edges = np.linspace(0, len(live), width + 1).astype(int)
        tops = [int(live[start : max(end, start + 1)].max()) for start, end in itertools.pairwise(edges)]
        line = "".join(_BARS[min(7, top * 8 // highest)] for top in tops)
        console.print(Text(f"{result.policy[:11]:<11}  {line}"))


def _plan(study: CheckpointStudy, console: Console) -> None:
    plan, result = study.plan, study.plan.result
    console.print()
    console.print(
        Text.assemble(
            (f"Plan under {gib(plan.budget_bytes)} GiB: ", "bold"),
            f"checkpoint {len(result.modules)} of {len(study.layers)} blocks, "
            f"peak {gib(result.rank.allocated_bytes)} GiB, "
            f"recompute +{result.extra_flops_percent:.1f} % of the step's FLOPs",
        )
    )
    if result.modules:
        console.print(Text("  " + ", ".join(result.modules)))
