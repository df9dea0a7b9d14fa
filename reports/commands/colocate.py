"""`metapeak colocate`."""

from __future__ import annotations

import argparse

from metapeak.reports.commands.base import (
    DONE,
    add_json,
    add_model,
    add_require_fit,
    check_targets,
    exit_code,
    put_result,
    quiet_transformers,
)
from metapeak.tracer.errors import InputError

# Settings of `serve` that mean the engine here; the others have the names of the trainer's.
_OF_THE_ENGINE = (
    "engine_version", "kv_dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
    "gpu_memory_utilization", "enforce_eager",
)  # fmt: skip


class Colocate:
    """`metapeak colocate MODEL --gpu NAME`: a trainer and an inference engine on one card, instant by instant."""

    name = "colocate"
    help = "a trainer and an inference engine on one card (GRPO, PPO): the peak over both, instant by instant"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from metapeak.reports.options import add_flags
        from metapeak.strategies.serving.settings import SERVING_SETTINGS

        add_model(parser)
        group = parser.add_argument_group("the engine beside the trainer")
        group.add_argument("--serve-engine", default="vllm", metavar="NAME", help="default vllm")
        group.add_argument("--serve-tp", type=int, default=1, metavar="N", help="tensor parallel ranks of the engine")
        add_flags(group, [setting for setting in SERVING_SETTINGS if setting.name in _OF_THE_ENGINE])
        group.add_argument(
            "--sleep", type=int, default=0, metavar="LEVEL", help="1 or 2: asleep while the trainer steps"
        )
        group.add_argument("--offload-trainer", action="store_true", help="its states on the host during generation")
        output = parser.add_argument_group("output")
        add_json(output)
        add_require_fit(output)

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.colocation import colocation_record, print_colocation
        from metapeak.reports.options import resolve_options
        from metapeak.reports.progress import Progress
        from metapeak.strategies.colocate import MEMORY_FRACTION, check_colocation, colocate
        from metapeak.strategies.request import gpu_of, simulate_resolved
        from metapeak.strategies.serving.settings import SERVING_SETTINGS, serve_resolved
        from metapeak.strategies.settings import resolve
        from metapeak.tracer.simulation import Option

        quiet_transformers()
        check_colocation(arguments.serve_engine, arguments.sleep, arguments.offload_trainer)
        options = resolve_options(arguments)
        if gpu_of(options) is None:
            raise InputError("colocate needs --gpu NAME or --gpu-memory 24GiB: the engine takes a fraction of it.")
        targets = check_targets(arguments)
        given = {name: getattr(arguments, name) for name in _OF_THE_ENGINE}
        given |= {"engine": arguments.serve_engine, "tp": arguments.serve_tp}
        engine = {
            name: Option(value=value, origin="command line") for name, value in given.items() if value is not None
        }
        shared = ("gpu", "gpu_memory", "task", "trust_remote_code")
        usual = Option(value=MEMORY_FRACTION, origin="trl trainer/grpo_config.py:vllm_gpu_memory_utilization")
        serving_options = resolve(
            {"gpu_memory_utilization": usual, **{name: options[name] for name in shared}},
            engine,
            settings=SERVING_SETTINGS,
        )
        with Progress() as progress:
            trainer = simulate_resolved(arguments.model, options, progress=progress)
            serving = serve_resolved(arguments.model, serving_options, progress=progress)
        found = colocate(trainer, serving, sleep=arguments.sleep, offload_trainer=arguments.offload_trainer)
        record = {**options, **{f"serve_{name}": option for name, option in serving_options.items()}}
        put_result(
            arguments, targets, lambda: colocation_record(found, record), lambda out: print_colocation(found, out)
        )
        return exit_code(found.fit.verdict) if arguments.require_fit else DONE
