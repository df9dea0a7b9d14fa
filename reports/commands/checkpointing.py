"""`metapeak checkpointing`."""

from __future__ import annotations

import argparse

from metapeak.reports.commands.base import (
    DONE,
    add_json,
    add_model,
    check_targets,
    put_file,
    put_result,
    quiet_transformers,
)
from metapeak.tracer.errors import InputError


class Checkpointing:
    """`metapeak checkpointing MODEL`: policies compared, layer by layer; the best plan under a budget."""

    name = "checkpointing"
    help = "gradient checkpointing policies compared, layer by layer; the best plan under a budget"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_model(parser)
        output = parser.add_argument_group("plan and output")
        output.add_argument("--budget", metavar="SIZE", help="find the plan with the least recompute under 24GiB, say")
        output.add_argument("--plan", metavar="FILE", help="write the plan, for apply_checkpoint_plan")
        output.add_argument("--verify", action="store_true", help="trace every policy anew with torch.utils.checkpoint")
        add_json(output)

    def run(self, arguments: argparse.Namespace) -> int:
        from metapeak.reports.checkpointing import print_study, study_record
        from metapeak.reports.options import resolve_options
        from metapeak.reports.progress import Progress
        from metapeak.strategies.checkpoint_policies import Nothing, parse_policy
        from metapeak.strategies.checkpoint_study import study_checkpointing, verify
        from metapeak.strategies.lifecycle import Lifecycle
        from metapeak.strategies.parallel.ranks import layout_of
        from metapeak.strategies.request import (
            allocator_of,
            gpu_of,
            lifecycle_of,
            memory_of,
            model_spec,
            model_strategies,
            step_spec,
            strategies_of,
        )

        quiet_transformers()
        options = resolve_options(arguments)
        gpu, allocator = gpu_of(options), allocator_of(options)
        budget = memory_of(arguments.budget) if arguments.budget else None
        if arguments.plan and budget is None and gpu is None:
            raise InputError("--plan needs --budget, --gpu or --gpu-memory to plan for.")
        asked = parse_policy(options["checkpointing"].value)
        targets = check_targets(arguments, "plan")
        model, step = model_spec(arguments.model, options), step_spec(options)
        strategies = model_strategies(options)
        if layout_of(strategies_of(options)) is not None:
            raise InputError(
                "checkpointing compares policies on one GPU, and this step runs on several. Leave engine and degrees "
                "out, or estimate one policy: metapeak estimate MODEL --checkpointing POLICY."
            )
        if lifecycle_of(options) != Lifecycle():
            raise InputError(
                "checkpointing compares training steps: leave out evaluation, generation, save and load, or estimate "
                "one policy with them."
            )
        with Progress() as progress:
            study = study_checkpointing(
                model,
                step,
                [] if isinstance(asked, Nothing) else [asked],
                strategies=strategies,
                budget_bytes=budget,
                gpu=gpu,
                allocator=allocator,
                options=options,
                progress=progress,
            )
            verified = None
            if arguments.verify:
                verified = {
                    result.policy: verify(
                        result, model, step, strategies=strategies, gpu=gpu, allocator=allocator, progress=progress
                    )
                    for result in study.policies
                }
        if "--plan" in targets:
            put_file(targets["--plan"], study.plan.record(study.simulation.model.id))
        put_result(
            arguments, targets, lambda: study_record(study, verified), lambda out: print_study(study, out, verified)
        )
        return DONE
