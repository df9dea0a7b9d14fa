"""`metapeak plan`."""

from __future__ import annotations

import argparse
import datetime
import shlex
from typing import TYPE_CHECKING

from metapeak.reports.commands.base import (
    DONE,
    add_cache,
    add_json,
    check_targets,
    open_cache,
    put_result,
    quiet_transformers,
)
from metapeak.tracer.errors import InputError

if TYPE_CHECKING:
    from metapeak.tracer.instances import Instance

# The catalogue that is read from the package gpuhunt.
LIVE = "gpuhunt"
# What a plan chooses where nobody did, and asks for by flags of its own.
_OWN = ("gpu", "gpus", "gpu_memory", "microbatches")
_CHOSEN = ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "batch_size", "grad_accum")
ORDERS = ("cost", "time")
_LISTS = {"method": "methods", "checkpointing": "policies", "schedule": "schedules"}


class PlanCommand:
    """`metapeak plan MODEL --gpu NAME[,NAME] --gpus N`: layouts that fit, by cost per token or by time."""

    name = "plan"
    help = "search layouts, micro-batches and checkpointing that fit; instances and prices"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from metapeak.reports.options import add_to_parser

        parser.add_argument("model", metavar="MODEL", help="Hugging Face id, folder, config.json or file.py:function")
        own = parser.add_argument_group("what to plan")
        own.add_argument("--gpu", required=True, metavar="NAME[,NAME]", help="GPUs to choose from (metapeak gpus)")
        own.add_argument("--gpus", default="1..8", metavar="N", help="how many: 8, or 1,2,4, or 8..64 (doublings)")
        own.add_argument("--tokens-per-batch", type=int, metavar="N", help="of one optimizer step, over all GPUs")
        own.add_argument("--methods", metavar="NAME[,NAME]", help="methods to choose from; default: --method, or full")
        own.add_argument("--headroom", type=float, default=5.0, metavar="PERCENT", help="of the memory to stay free")
        own.add_argument("--order", choices=ORDERS, default="cost", help="per token; default cost")
        own.add_argument("--top", type=int, default=3, metavar="N", help="plans to show; default 3")
        own.add_argument("--seconds", type=float, default=120.0, metavar="S", help="time for simulations")
        own.add_argument("--jobs", type=int, metavar="N", help="processes that simulate; default 2, or 1 on one core")
        own.add_argument(
            "--instances",
            metavar="CSV",
            help="a newer catalogue of instances, with the same columns, or gpuhunt for what that package lists now",
        )
        own.add_argument(
            "--checkpoint-interval",
            type=float,
            default=60.0,
            metavar="MINUTES",
            help="between checkpoints that are kept",
        )
        add_to_parser(parser, _settings())
        output = parser.add_argument_group("output")
        add_json(output)
        add_cache(output)

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.options import given_options
        from metapeak.reports.plan import plan_record, print_plan
        from metapeak.reports.progress import Progress
        from metapeak.strategies.planning.planner import gpus_of, plan
        from metapeak.strategies.processes import cores

        quiet_transformers()
        _check(arguments)
        given = given_options(arguments, _settings())
        gpus = gpus_of(arguments.gpu)
        instances, prices = _instances(arguments.instances)
        targets = check_targets(arguments)
        with Progress() as progress:
            found = plan(
                arguments.model,
                [_standing(options) for options in given],
                gpus,
                _free(arguments, {**given[0], **given[1]}),
                instances=instances,
                tokens_per_batch=arguments.tokens_per_batch,
                headroom=arguments.headroom / 100,
                order=arguments.order,
                top=arguments.top,
                seconds=arguments.seconds,
                jobs=arguments.jobs or min(2, cores()),
                cache=open_cache(arguments),
                progress=progress,
            )
        interval = arguments.checkpoint_interval
        put_result(
            arguments,
            targets,
            lambda: plan_record(found, prices, interval),
            lambda console: print_plan(found, _command(arguments), prices, interval, console),
        )
        return DONE


def _instances(named: str | None) -> tuple[tuple[Instance, ...], str]:
    """The catalogue of instances, and what to say about its prices."""
    from metapeak.reports.plan import prices_of_catalogue
    from metapeak.tracer.instances import all_instances, read_instances

    if named is None:
        return all_instances(), prices_of_catalogue()
    if named != LIVE:
        return read_instances(named), f"of {named}"
    from metapeak.tracer.live_prices import live_instances

    day = datetime.date.today().isoformat()
    return live_instances(), f"listed by gpuhunt, read on {day}, at the cheapest location of each; no offers"


def _settings():
    """Every option of an estimate but those that a plan asks for in its own way."""
    from metapeak.strategies.settings import SETTINGS

    return tuple(setting for setting in SETTINGS if setting.name not in _OWN)


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (
        ("top", 1),
        ("seconds", 0),
        ("headroom", 0),
        ("checkpoint_interval", 0),
        ("tokens_per_batch", 1),
        ("jobs", 1),
    ):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} is {value:g}, but has to be at least {least}.")
    if arguments.headroom >= 100:
        raise InputError("--headroom is a percentage below 100.")


def _command(arguments: argparse.Namespace) -> str:
    """`metapeak estimate MODEL` with the options that were given and that the plan did not choose."""
    words = ["metapeak", "estimate", arguments.model]
    words += ["--config", arguments.config] if arguments.config else []
    for setting in _settings():
        value = getattr(arguments, setting.name)
        if value is not None and setting.name not in (*_CHOSEN, *_LISTS):
            words += [setting.flag] if value is True else [setting.flag, str(value)]
    return shlex.join(words)


def _free(arguments: argparse.Namespace, given):
    """What the plan may choose: what was given stands."""
    from metapeak.strategies.planning.candidates import Open, counts_of
    from metapeak.strategies.settings import BY_NAME
    from metapeak.tracer.errors import UnknownName

    methods = ["full"]
    if arguments.methods:
        known = BY_NAME["method"].choices
        methods = [name.strip() for name in arguments.methods.split(",")]
        for name in methods:
            if name not in known:
                raise UnknownName("method", name, known)
    elif "method" in given:
        methods = [given["method"].value]
    chosen = {name: [given[name].value] for name in _CHOSEN if name in given}
    chosen |= {_LISTS[name]: [given[name].value] for name in ("checkpointing", "schedule") if name in given}
    return Open(gpus=counts_of(arguments.gpus), methods=methods, **chosen)


def _standing(options):
    """What stands whatever the plan chooses."""
    return {name: option for name, option in options.items() if name not in (*_CHOSEN, *_LISTS)}
