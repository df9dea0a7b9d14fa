"""The plan as a table and as a record."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from metapeak.reports.data import SCHEMA_VERSION
from metapeak.reports.sizes import gib
from metapeak.strategies.planning.offers import BILLING, interruption
from metapeak.strategies.planning.planner import SAME, Plan, Planned
from metapeak.strategies.planning.step_time import LINK_REACHED
from metapeak.strategies.serving.speed import BANDWIDTH_REACHED, FLOPS_REACHED
from metapeak.tracer.instances import COLLECTED

NARROW = 110


def plan_record(plan: Plan, prices_from: str, interval_minutes: float) -> dict[str, Any]:
    """Plain values; bytes are integers, times seconds, money USD."""
    return {
        "schema_version": SCHEMA_VERSION,
        "candidates": plan.candidates,
        "excluded": dict(plan.excluded),
        "simulated": plan.simulated,
        "left": plan.left,
        "in_time": plan.in_time,
        "traces": plan.traces,
        "seconds": round(plan.seconds, 3),
        "prices_from": prices_from,
        "plans": [_planned(one, interval_minutes) for one in plan.found],
        "refused": list(plan.refused),
        "assumptions": list(assumptions(plan, prices_from)),
    }


def _planned(one: Planned, interval_minutes: float) -> dict[str, Any]:
    candidate, fit, rank = one.candidate, one.simulation.fit, one.simulation.worst
    lost = interruption(one.work, one.offers[0].machines if one.offers else 1, interval_minutes)
    return {
        "gpu": candidate.gpu,
        "gpus": candidate.gpus,
        "layout": {name: getattr(candidate, name) for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")},
        "schedule": candidate.schedule,
        "method": candidate.method,
        "micro_batch": candidate.batch_size,
        "grad_accum": candidate.grad_accum,
        "checkpointing": candidate.checkpointing,
        "options": candidate.options,
        "peak": {"requested_bytes": rank.requested_bytes, "device_bytes": rank.device_bytes},
        "headroom_bytes": fit.headroom_bytes,
        "verdict": fit.verdict.value,
        "step_seconds": list(one.time.seconds),
        "bound_by": one.time.bound,
        "tokens_per_second": list(one.tokens_a_second),
        "checkpoint_bytes": lost.checkpoint_bytes,
        "interruption_seconds": list(lost.lost_seconds),
        "checkpoint_write_seconds": list(lost.write_seconds),
        "offers": [
            {
                "cloud": offer.instance.cloud,
                "instance": offer.instance.name,
                "machines": offer.machines,
                "region": offer.instance.region,
                "fabric": offer.instance.fabric,
                "local_nvme_gb": offer.instance.local_nvme_gb,
                "price_hour": offer.price_hour,
                "usd_per_million_tokens": offer.on_demand and list(offer.on_demand),
                "spot_usd_per_million_tokens": offer.spot and list(offer.spot),
            }
            for offer in one.offers
        ],
    }


def print_plan(plan: Plan, command: str, prices_from: str, interval_minutes: float, console: Console) -> None:
    """Print the best first, what it costs where, and how the others were judged.

    `command` is the estimate that stands behind every row, up to the options that the plan chose.
    """
    narrow = console.width < NARROW
    if not plan.found:
        console.print(Text(_none(plan), style="red"))
    else:
        console.print(_table(plan, narrow))
        _print_best(plan, command, interval_minutes, console)
    for line in counts(plan):
        console.print(Text(line, style="dim"))
    for reason, candidate in plan.refused.items():
        console.print(Text(f"Refused: {candidate.layout} on {candidate.gpus} x {candidate.gpu}: {reason}", style="dim"))
    console.print(Text("Assumed: " + "; ".join(assumptions(plan, prices_from)) + ".", style="dim"))


def _table(plan: Plan, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    columns = ["", "GPUs", "layout", "method", "batch", "checkpoints", "GiB", "free", "s a step"]
    columns += ["tokens/s", "USD/1M tokens", "on spot"]
    hidden = {"free", "s a step", "on spot", "checkpoints"} if narrow else set()
    if len({one.candidate.method for one in plan.found}) == 1:
        hidden.add("method")
    words = ("GPUs", "layout", "method", "checkpoints")
    for name in columns:
        if name not in hidden:
            table.add_column(
                name,
                justify="left" if name in words else "right",
                no_wrap=name != "layout" and not narrow,
                overflow="fold",
            )
    for number, one in enumerate(plan.found, 1):
        cells = dict(zip(columns, _cells(number, one)))
        table.add_row(*(cell for name, cell in cells.items() if name not in hidden))
    return table


def _cells(number: int, one: Planned) -> list[str]:
    candidate, cheapest = one.candidate, one.offers[0] if one.offers else None
    spots = [offer.spot for offer in one.offers if offer.spot]
    return [
        str(number),
        f"{candidate.gpus} x {candidate.gpu}",
        candidate.layout + (f", {candidate.schedule}" if candidate.schedule else ""),
        candidate.method,
        f"{candidate.batch_size} x {candidate.grad_accum}",
        candidate.checkpointing,
        gib(one.simulation.worst.device_bytes),
        gib(one.simulation.fit.headroom_bytes),
        _span(one.time.seconds),
        _span(one.tokens_a_second),
        _span(cheapest.on_demand) if cheapest and cheapest.on_demand else "no price",
        _span(min(spots)) if spots else "",
    ]


def _print_best(plan: Plan, command: str, interval_minutes: float, console: Console) -> None:
    """Where to rent the first, how to run it, and what an interruption of it costs."""
    best = plan.found[0]
    flags = " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in best.candidate.options.items()
    )
    console.print(Text(f"The first is limited by {best.time.bound}, at best. Estimate it: {command} {flags}"))
    for offer in best.offers[:3]:
        item = offer.instance
        price = "no on-demand price" if offer.price_hour is None else f"{offer.price_hour:.2f} USD an hour"
        spot = "" if item.spot_price_hour is None else f", spot seen at {item.spot_price_hour * offer.machines:.2f}"
        link = f"; {item.fabric}" if offer.machines > 1 else ""
        disk = "" if item.local_nvme_gb is None else f"; local NVMe {item.local_nvme_gb:,.0f} GB"
        console.print(
            Text(
                f"  {offer.machines} x {item.cloud} {item.name} ({item.region}): {price}{spot}{link}{disk}; billed "
                f"{BILLING.get(item.cloud, 'as the provider says')}"
            )
        )
    lost = interruption(best.work, best.offers[0].machines if best.offers else 1, interval_minutes)
    console.print(
        Text(
            f"  A checkpoint is {gib(lost.checkpoint_bytes)} GiB, {_span(lost.write_seconds)} s to write; kept every "
            f"{interval_minutes:g} minutes, an interruption costs "
            f"{_span([seconds / 60 for seconds in lost.lost_seconds])} minutes on average and the wait for a new one."
        )
    )


def counts(plan: Plan) -> list[str]:
    """What became of the layouts: how many there were, which rule left out how many, how many were simulated."""
    out = sum(plan.excluded.values())
    late = "" if plan.in_time else " for want of time (--seconds)"
    lines = [
        f"{plan.candidates:,} layouts in {plan.seconds:.1f} s: {plan.simulated} simulated, {out:,} left out by rule, "
        f"{plan.left:,} not looked at{late or ', all of them ranked below those shown'}."
    ]
    return lines + [f"  {count:,}: {rule}" for rule, count in sorted(plan.excluded.items(), key=lambda item: -item[1])]


def assumptions(plan: Plan, prices_from: str) -> tuple[str, ...]:
    """The sentences that every plan prints."""
    reached = [f"{share[0]:.0%} to {share[1]:.0%}" for share in (FLOPS_REACHED, BANDWIDTH_REACHED, LINK_REACHED)]
    return (
        f"kernels reach {reached[0]} of the data sheet's dense FLOPs and {reached[1]} of its bandwidth, collectives "
        f"{reached[2]} of the links, overlapped in the best case and one after the other in the worst",
        f"costs and times within {SAME - 1:.0%} count as equal, and the layout with fewer parts goes first",
        "gradients are reduced after every micro-batch, those of a pipeline once a step",
        "tensor parallelism stays inside machines of 8; pipelines wait (pp - 1) / microbatches of their time",
        f"the least that a rank takes is from {plan.traces} steps traced on one GPU, "
        + ("exact functions of the batch" if plan.exact else "taken to grow as the batch does, as they differ in kind"),
        f"prices are list prices {prices_from}, not offers; spot prices were seen once",
        "reading and writing checkpoints at 0.5 to 5 GB/s a machine",
    )


def prices_of_catalogue() -> str:
    return f"of the built-in catalogue, collected on {COLLECTED}"


def _none(plan: Plan) -> str:
    if plan.simulated == 0:
        return "Nothing fits: the least that a rank takes is more than these GPUs have."
    return f"Nothing of the {plan.simulated} layouts that were simulated fits with the headroom asked for."


def _span(pair) -> str:
    """A range with two or three significant digits: 1.2-3.4."""
    return "-".join(_short(value) for value in pair)


def _short(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}" if value < 1 else f"{value:.2f}"
