"""`--verify` for FSDP2: the rewrite of the unsharded step beside the real `fully_shard`, phase by phase.

The prediction is the real library's, run on the phantom GPU. The rewrite (fsdp2_rewrite.py) comes to the same bytes by
another way, from a step that knows nothing of ranks: where both agree, neither the tracing of collectives nor the rules
are wrong alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metapeak.strategies.base import NoOpStrategy
from metapeak.strategies.checkpoint_policies import Nothing, parse_policy
from metapeak.strategies.gradient_checkpointing import GradientCheckpointing
from metapeak.strategies.parallel.fsdp2 import FSDP2
from metapeak.strategies.parallel.fsdp2_plan import Sharding
from metapeak.strategies.parallel.fsdp2_rewrite import sharded
from metapeak.strategies.parallel.units import BLOCKS
from metapeak.strategies.request import (
    lifecycle_of,
    model_spec,
    model_strategies,
    step_spec,
    strategies_of,
)
from metapeak.strategies.settings import DTYPES
from metapeak.tracer.errors import InputError
from metapeak.tracer.simulation import Option, RankResult, Simulation

if TYPE_CHECKING:
    import torch

    from metapeak.strategies.parallel.fsdp1 import FSDP1
    from metapeak.tracer.graph import StepGraph
    from metapeak.tracer.spec import StepSpec

_NAMES = {full: name for name, full in DTYPES.items()}


def verified(
    reference: str,
    simulation: Simulation,
    options: Mapping[str, Option],
    progress: Callable[[str], None] = lambda what: None,
) -> list[dict[str, Any]]:
    """A record for every rank that was traced: {"rank", "phases": [{"iteration", "phase", "traced_peak_bytes",
    "rewritten_peak_bytes", "traced_end_bytes", "rewritten_end_bytes"}], "equal"}, traced storages without workspaces.

    Raises InputError for a job that is not FSDP2's, or one that the rewrite refuses.
    """
    strategies = strategies_of(options)
    fsdp = next((strategy for strategy in strategies if isinstance(strategy, FSDP2)), None)
    if fsdp is None:
        raise InputError("--verify compares the two ways to FSDP2's bytes: it needs --dp-shard with engine fsdp2.")
    if fsdp.layout.world_size != fsdp.layout.dp_shard:
        raise InputError(f"--verify: the rewrite knows shards alone, not {fsdp.layout}.")
    if fsdp.wrap != (BLOCKS,):
        raise InputError(f"--verify: the rewrite's units are the blocks, not {', '.join(fsdp.wrap)}.")
    if options["grad_accum"].value > 1:
        raise InputError("--verify: gradient accumulation is not rewritten.")
    if fsdp.cpu_offload:
        raise InputError("--verify: shards on the host (cpu_offload) are not rewritten.")
    if not lifecycle_of(options).is_training_alone:
        raise InputError("--verify compares training steps: leave evaluation, generation, saving and loading out.")
    progress("verifying: the unsharded step")
    graph = unsharded_step(reference, fsdp, options)
    liveness = graph.liveness()
    policy = parse_policy(options["checkpointing"].value)
    if not isinstance(policy, Nothing):
        liveness = GradientCheckpointing(policy=policy).rewrite(liveness, graph)
    return [_compared(rank, _phases(rank, fsdp, liveness, graph)) for rank in simulation.ranks]


def unsharded_step(
    reference: str, fsdp: FSDP1 | FSDP2, options: Mapping[str, Option], step: StepSpec | None = None
) -> StepGraph:
    """The unsharded step on one GPU, in the dtype that FSDP computes in, with what autograd saves apart."""
    from metapeak.strategies.prepared import plain_step_graph

    if fsdp.param_dtype is not None:
        computed = Option(value=_NAMES[fsdp.param_dtype], origin="param_dtype")
        options = {**options, "weights_dtype": computed}
    output = getattr(fsdp, "output_dtype", None)
    cast = [_OutputCast(dtype=output)] if output is not None else []
    strategies = [*model_strategies(options), *cast]
    return plain_step_graph(model_spec(reference, options), step or step_spec(options), strategies)


@dataclass(frozen=True, kw_only=True)
class _OutputCast(NoOpStrategy):
    """The cast of what the root returns, FSDP2's `output_dtype`: _fsdp_state.py, _cast_output_dtype."""

    dtype: str
    name = "output_dtype"

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        import torch
        from torch.utils._pytree import tree_map_only

        dtype = getattr(torch, self.dtype)

        def cast(tensor):
            return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

        module.register_forward_hook(lambda module, args, output: tree_map_only(torch.Tensor, cast, output))
        return module


def _phases(rank: RankResult, fsdp: FSDP2, liveness, graph):
    sharding = Sharding(
        world_size=fsdp.layout.dp_shard,
        rank=rank.rank,
        reshard_after_forward=fsdp.reshard_after_forward,
        orig_dtype="float32" if fsdp.upcast != "none" else None,
        reduce_dtype=fsdp.reduce_dtype if fsdp.reduce_dtype != fsdp.param_dtype else None,
    )
    return sharded(liveness, graph, graph.block_names, sharding).phases()


def _compared(rank: RankResult, rewritten) -> dict[str, Any]:
    rows = [
        {
            "iteration": traced.iteration,
            "phase": traced.phase,
            "traced_peak_bytes": traced.peak_bytes,
            "rewritten_peak_bytes": other.peak_bytes,
            "traced_end_bytes": traced.end_bytes,
            "rewritten_end_bytes": other.end_bytes,
        }
        for traced, other in zip(rank.phases, rewritten, strict=True)
    ]
    return {"rank": rank.rank, "phases": rows, "equal": list(rank.phases) == list(rewritten)}
