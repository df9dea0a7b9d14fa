"""The report of `metapeak serve`: as text and as a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from metapeak.reports.data import SCHEMA_VERSION
from metapeak.reports.sizes import gib, size
from metapeak.reports.summary import print_sentences, verdict_style
from metapeak.strategies.serving import Serving
from metapeak.strategies.serving.room import ServingRank
from metapeak.strategies.serving.speed import Cost, egress_cost
from metapeak.tracer.instances import COLLECTED
from metapeak.tracer.kv_cache import CacheLayout
from metapeak.tracer.simulation import Option, Verdict

SHOWN_INSTANCES = 5
_VERDICTS = {
    Verdict.FITS: "Fits",
    Verdict.BORDERLINE: "Borderline on",
    Verdict.DOES_NOT_FIT: "Does not fit",
}


def serving_record(serving: Serving, options: Mapping[str, Option]) -> dict[str, Any]:
    """The JSON-able record; bytes are those of the rank with the least room."""
    worst, layout = serving.worst, serving.worst.layout
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {
            "id": serving.model.id,
            "source": serving.model.source,
            "architecture": serving.model.architecture,
            "parameters": serving.model.parameters,
            "parameter_bytes": serving.model.parameter_bytes,
        },
        "options": {name: {"value": option.value, "from": option.origin} for name, option in options.items()},
        "egress_usd_per_million_tokens": egress_per_million(options),
        "how": {
            "traced": True,
            "torch": serving.how.torch,
            "transformers": serving.how.transformers,
            "seconds": dict(serving.how.seconds),
            "assumptions": list(serving.how.assumptions),
            "not_modelled": list(serving.how.not_modelled),
        },
        "engine": {
            "name": serving.spec.engine,
            "rule": serving.budget.rule,
            "limit_bytes": serving.budget.limit_bytes,
            "max_num_batched_tokens": serving.settings.batched_tokens,
            "max_num_seqs": serving.settings.max_seqs,
            "block_size": serving.settings.block_size,
            "memory_fraction": serving.settings.memory_fraction,
        },
        "weights_bytes": worst.weights_bytes,
        "weights_requested_bytes": worst.weights_requested_bytes,
        "weights_dtype": serving.weights_dtype,
        **_layout(layout),
        "prefill_activation_bytes": serving.prefill_activation_bytes,
        "overheads": {
            item.name: {"low": item.low_bytes, "high": item.high_bytes, "tag": item.tag, "source": item.source}
            for item in (*worst.charges, *serving.budget.outside)
        },
        "kv_cache_bytes": worst.kv_cache_bytes,
        "kv_cache_range": {"low": worst.kv_cache_range[0], "high": worst.kv_cache_range[1]},
        "kv_tokens": serving.kv_tokens,
        "max_model_len": serving.max_model_len,
        "context": serving.context,
        "kv_bytes_per_sequence": serving.sequence_bytes,
        "max_concurrent_sequences": serving.max_concurrent_sequences,
        "concurrency_at_context": serving.concurrency_at_context,
        "longest_context": serving.longest_context,
        "speed": _speed(serving),
        "costs": [_cost(cost) for cost in serving.costs],
        "ranks": [_rank(rank) for rank in serving.ranks],
        "fit": {
            "gpu": serving.gpu.id,
            "capacity_bytes": serving.gpu.usable_bytes,
            "verdict": serving.fit.verdict.value,
            "headroom_bytes": serving.fit.headroom_bytes,
        },
    }


def egress_per_million(options: Mapping[str, Option]) -> float | None:
    """USD for sending a million tokens as text, at the price that was given."""
    price = options["egress_price"].value
    return None if price is None else egress_cost(10**6, price)


def _layout(layout: CacheLayout) -> dict[str, Any]:
    return {
        "kv_bytes_per_token": layout.bytes_per_token,
        "kv_bytes_per_token_past_windows": layout.bytes_per_token_past_windows,
        "cross_attention_bytes_per_token": layout.cross_bytes_per_token,
        "state_bytes_per_sequence": layout.state_bytes,
        "sliding_windows": list(layout.windows),
        "cache_class": layout.kind,
    }


def _speed(serving: Serving) -> dict[str, Any] | None:
    speed = serving.speed
    if speed is None:
        return None
    return {
        "batch": speed.batch,
        "decode_tokens_per_second_one": _range(speed.decode_one),
        "decode_tokens_per_second": _range(speed.decode_batch),
        "prefill_tokens_per_second": _range(speed.prefill) if speed.prefill else None,
        "cold_start_seconds": _range(speed.cold_start_seconds),
    }


def _range(pair: tuple[float, float]) -> dict[str, float]:
    return {"low": round(pair[0], 4), "high": round(pair[1], 4)}


def _cost(cost: Cost) -> dict[str, Any]:
    return {
        "cloud": cost.instance.cloud,
        "instance": cost.instance.name,
        "gpus": cost.instance.count,
        "replicas": cost.replicas,
        "price_hour": cost.instance.price_hour,
        "spot_price_hour": cost.instance.spot_price_hour,
        "usd_per_million_tokens": _range(cost.on_demand),
        "usd_per_million_tokens_spot": _range(cost.spot) if cost.spot else None,
        "collected": COLLECTED,
    }


def _print_speed(serving: Serving, console: Console) -> None:
    speed = serving.speed
    if speed is None:
        return
    prefill = f", prefill {span(speed.prefill)}" if speed.prefill else ""
    console.print(
        f"Tokens a second at most: one sequence {span(speed.decode_one)}, {speed.batch:,} sequences "
        f"{span(speed.decode_batch)}{prefill}; weights read from storage in {span(speed.cold_start_seconds)} s"
    )
    if not serving.costs:
        return
    table = Table(box=None, pad_edge=False)
    for name in ("cloud", "instance"):
        table.add_column(name, no_wrap=True)
    for name in ("GPUs", "$ an hour", "$ per M tokens", "on spot"):
        table.add_column(name, justify="right")
    for cost in serving.costs[:SHOWN_INSTANCES]:
        instance = cost.instance
        spot = f"{cost.spot[0]:.2f} to {cost.spot[1]:.2f}" if cost.spot else ""
        demand = f"{cost.on_demand[0]:.2f} to {cost.on_demand[1]:.2f}"
        table.add_row(instance.cloud, instance.name, f"{instance.count:g}", f"{instance.price_hour:g}", demand, spot)
    console.print(table)
    console.print(f"List prices as collected on {COLLECTED}, the batch always full; spot may be stopped any time.")


def span(pair: tuple[float, float]) -> str:
    """A range of numbers as text."""
    low, high = (f"{value:,.0f}" if value >= 10 else f"{value:.1f}" for value in pair)
    return f"{low} to {high}"


def _rank(rank: ServingRank) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "stage": rank.stage,
        "weights_bytes": rank.weights_bytes,
        "kv_bytes_per_token": rank.layout.bytes_per_token,
        "kv_cache_bytes": rank.kv_cache_bytes,
    }


def print_serving(serving: Serving, console: Console) -> None:
    """Print the verdict, where the memory goes, what fits, and what was assumed."""
    spec, worst, fit = serving.spec, serving.worst, serving.fit
    ranks = f", tp {spec.tp}" * (spec.tp > 1) + f", pp {spec.pp}" * (spec.pp > 1)
    weights = spec.quantization or serving.weights_dtype
    console.print(
        Text.assemble(
            (serving.model.id, "bold"),
            f"   served by {spec.engine}{ranks}, {weights} weights, up to {serving.max_model_len:,} tokens   ",
            (f"traced, {sum(v for k, v in serving.how.seconds.items() if k != 'import'):.1f} s", "dim"),
        )
    )
    need = "a sequence" if spec.concurrency == 1 else f"{spec.concurrency} sequences"
    console.print(
        Text.assemble(
            (f"{_VERDICTS[fit.verdict]} {serving.gpu.id}", verdict_style(fit.verdict)),
            f": {need} of {serving.context:,} tokens need{'s' * (spec.concurrency == 1)} "
            f"{gib(serving.sequence_bytes * spec.concurrency)} GiB of cache, the engine has "
            f"{gib(worst.kv_cache_bytes)} ({gib(worst.kv_cache_range[0])} to {gib(worst.kv_cache_range[1])})",
        )
    )
    console.print(
        f"At most {serving.max_concurrent_sequences:,} sequences of {serving.context:,} tokens; one of up to "
        f"{serving.longest_context:,}; {serving.kv_tokens:,} tokens of cache"
    )
    console.print()
    console.print(_waterfall(serving, worst))
    console.print()
    console.print(_cache_line(worst.layout, serving))
    if len(serving.ranks) > 1:
        stages = ", ".join(f"stage {rank.stage} {gib(rank.weights_bytes)}" for rank in serving.ranks)
        console.print(f"Weights by stage, GiB: {stages}")
    _print_speed(serving, console)
    print_sentences("Assumed", serving.how.assumptions, console)
    print_sentences("Not modelled", serving.how.not_modelled, console)


def _waterfall(serving: Serving, worst: ServingRank) -> Table:
    table = Table(box=None, pad_edge=False)
    for name, justify in (("GiB of a rank", "left"), ("", "right"), ("", "left")):
        table.add_column(name, justify=justify, no_wrap=justify != "left")
    gpu = serving.gpu
    table.add_row("what torch sees", gib(gpu.usable_bytes), gpu.usable_from)
    table.add_row("engine's limit", gib(serving.budget.limit_bytes), serving.budget.rule)
    table.add_row("weights", gib(worst.weights_bytes), "traced")
    charged = "traced" if serving.budget.charges_activations else "traced, outside the limit"
    table.add_row("prefill", gib(serving.prefill_activation_bytes), charged)
    for item in worst.charges:
        table.add_row(item.name.replace("_", " "), f"{gib(item.low_bytes)} to {gib(item.high_bytes)}", item.tag)
    for item in serving.budget.outside:
        text = f"{gib(item.low_bytes)} to {gib(item.high_bytes)}"
        table.add_row(item.name.replace("_", " "), text, f"{item.tag}, outside the limit")
    table.add_row("cache", gib(worst.kv_cache_bytes), "the rest")
    return table


def _cache_line(layout: CacheLayout, serving: Serving) -> Text:
    parts = [f"{layout.bytes_per_token:,} bytes a token"]
    if layout.windows:
        windows = ", ".join(map(str, layout.windows))
        parts.append(f"{layout.bytes_per_token_past_windows:,} past the window of {windows}")
    if layout.cross_bytes_per_token:
        parts.append(f"{layout.cross_bytes_per_token:,} a position of the encoder")
    if layout.state_bytes:
        parts.append(f"{size(layout.state_bytes)} a sequence whatever its length")
    parts.append(f"{size(serving.sequence_bytes)} for {serving.context:,} tokens")
    return Text(f"Cache of a rank: {', '.join(parts)}")
