"""How long a step takes, as a range: arithmetic, memory traffic and messages of the recorded step against data sheets.

What it changes: nothing.
Where each number comes from: FLOPs of the recorded operators by torch's formulas (tracer/flops.py), recompute with the
forward FLOPs of the blocks; traffic as every storage of forward and backward written once and read once; messages by
the sizes of parameters, gradients and hidden states. The least time is that of the largest of the three, each at the
upper share of its data sheet that kernels reach; the most is their sum, each at the lower share.
Not modelled: stragglers, input pipelines, kernel launches, overlap in detail. A range that holds for most jobs is wide.
Sources: collectives' volumes as in NCCL's documentation of bus bandwidth (ring algorithms); the four all-reduces of a
layer under tensor parallelism, Megatron-LM (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metapeak.strategies.planning.candidates import MACHINE_GPUS, Candidate
from metapeak.strategies.serving.speed import BANDWIDTH_REACHED, FLOPS_REACHED
from metapeak.tracer.gpus import Gpu

if TYPE_CHECKING:
    from metapeak.tracer.graph import StepGraph

# Share of a data sheet's link rate that collectives reach, assumed; those of kernels are serving/speed.py's.
LINK_REACHED = (0.4, 0.9)
# Bytes a second between machines, a GPU, where no instance says: 10 to 400 Gbit/s adapters. Assumed.
FABRIC_BYTES = (1.25e9, 50e9)
ALL_REDUCES_A_BLOCK = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one micro-batch of one sequence does on one GPU, and the model's sizes in bytes.

    `traffic_bytes` go to and from memory; `saved_bytes` and `checkpointed_bytes` are activations at the end of forward
    without and with full checkpointing.
    """

    forward_flops: int
    backward_flops: int
    block_flops: int
    traffic_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    saved_bytes: int
    checkpointed_bytes: int
    blocks: int
    hidden_bytes: int

    @property
    def kept_bytes(self) -> int:
        """What a checkpoint of the job holds."""
        return self.parameter_bytes + self.state_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step, (least, most), and which part the least is of."""

    seconds: tuple[float, float]
    bound: str

    @property
    def middle(self) -> float:
        """The geometric mean, by which plans are ordered."""
        least, most = self.seconds
        return (least * most) ** 0.5


def work_of(graph: StepGraph, config) -> Work:
    """The work in a step of one sequence, one iteration, recorded with `decouple_saves`."""
    import numpy as np

    from metapeak.strategies.checkpoint_policies import EveryBlock
    from metapeak.strategies.gradient_checkpointing import GradientCheckpointing
    from metapeak.tracer.flops import operation_flops
    from metapeak.tracer.liveness import Category, Phase

    flops, phase = operation_flops(graph), np.asarray(graph.phase)
    blocks = tuple(block + "." for block in graph.block_names)
    inside = np.array([graph.module_names[module].startswith(blocks) for module in graph.module]) & bool(blocks)
    birth, nbytes, category = np.asarray(graph.birth), np.asarray(graph.nbytes), np.asarray(graph.category)
    computed = np.isin(phase[birth], [Phase.FORWARD, Phase.BACKWARD])
    liveness = graph.liveness()
    rewritten = GradientCheckpointing(policy=EveryBlock()).rewrite(liveness, graph) if blocks else liveness

    def kept(of) -> int:
        end = next(one.end_bytes for one in of.phases() if one.phase == "forward")
        return end - of.phases()[0].end_bytes

    text = getattr(config, "get_text_config", lambda: config)()
    hidden = getattr(text, "hidden_size", None) or 0
    return Work(
        forward_flops=int(flops[phase == Phase.FORWARD].sum()),
        backward_flops=int(flops[phase == Phase.BACKWARD].sum()),
        block_flops=int(flops[(phase == Phase.FORWARD) & inside].sum()),
        traffic_bytes=2 * int(nbytes[computed].sum()),
        parameter_bytes=int(nbytes[category == Category.PARAMETER].sum()),
        gradient_bytes=int(nbytes[category == Category.GRADIENT].sum()),
        state_bytes=int(nbytes[category == Category.OPTIMIZER_STATE].sum()),
        saved_bytes=kept(liveness),
        checkpointed_bytes=kept(rewritten),
        blocks=len(graph.block_names),
        hidden_bytes=2 * hidden,
    )


def step_time(
    work: Work, one: Candidate, gpu: Gpu, seq_len: int, fabric: Sequence[float] = FABRIC_BYTES
) -> StepTime | None:
    """How long one optimizer step of the candidate takes; None for a GPU whose data sheet lacks a number.

    `fabric`: bytes a second that a GPU sends to other machines, (least, most).
    """
    peak = gpu.dense_flops.get("bf16") or gpu.dense_flops.get("fp16")
    if not peak or not gpu.bandwidth_bytes or not gpu.link_bytes:
        return None
    flops = work.forward_flops + work.backward_flops + (work.block_flops if one.checkpointing != "none" else 0)
    share = one.batch_size / one.tp
    again = 1 + (work.block_flops / max(flops, 1) if one.checkpointing != "none" else 0)
    compute = _range(flops * share, peak, FLOPS_REACHED)
    memory = _range(work.traffic_bytes * share * again, gpu.bandwidth_bytes, BANDWIDTH_REACHED)
    messages = _messages(work, one, gpu, fabric)
    reduces = (
        2 * (one.tp - 1) / one.tp * ALL_REDUCES_A_BLOCK * work.blocks * one.batch_size * seq_len * work.hidden_bytes
    )
    tensor = _range(reduces, gpu.link_bytes, LINK_REACHED)
    states = 2 * (work.parameter_bytes + work.gradient_bytes + work.state_bytes) / (one.dp_shard * one.tp)
    optimizer = _range(states, gpu.bandwidth_bytes, BANDWIDTH_REACHED)
    parts = {"arithmetic": compute, "memory": memory, "messages": messages}
    least = max(part[0] for part in parts.values())
    most = sum(part[1] for part in parts.values())
    return StepTime(
        seconds=(
            one.grad_accum * (least + tensor[0]) + optimizer[0],
            one.grad_accum * (most + tensor[1]) + optimizer[1],
        ),
        bound=max(parts, key=lambda name: parts[name][0]),
    )


def _messages(work: Work, one: Candidate, gpu: Gpu, fabric: Sequence[float]) -> tuple[float, float]:
    """Seconds of the gathers and reductions of one micro-batch, (least, most)."""
    shards, replicas = one.dp_shard, one.dp_replicate
    parameters, gradients = work.parameter_bytes / one.tp, work.gradient_bytes / one.tp
    sharded = (2 * parameters + gradients) * (shards - 1) / shards
    replicated = 2 * gradients / shards * (replicas - 1) / replicas
    return tuple(
        sharded / _rate(gpu, one.tp * shards, fabric, end) + replicated / _rate(gpu, one.gpus, fabric, end)
        for end in (1, 0)
    )


def _rate(gpu: Gpu, span: int, fabric: Sequence[float], end: int) -> float:
    """Bytes a second in a group of neighbours: the card's link in a machine, else the slower of it and the fabric."""
    rate = gpu.link_bytes if span <= MACHINE_GPUS else min(gpu.link_bytes, fabric[end])
    return rate * LINK_REACHED[end]


def _range(amount: float, rate: float, reached: Sequence[float]) -> tuple[float, float]:
    return amount / rate / reached[1], amount / rate / reached[0]
