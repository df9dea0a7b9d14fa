"""How long a step takes, as a range: arithmetic, memory traffic and messages of the recorded step against data sheets.

What it changes: nothing.
Where each number comes from: FLOPs of the recorded operators by torch's formulas (tracer/flops.py), recompute with the
forward FLOPs of the blocks; traffic as every storage of forward and backward written once and read once; messages by
the sizes of parameters, gradients and hidden states. The least time is that of the largest of the three, each at the
upper share of its data sheet that kernels reach; the most is their sum, each at the lower share.
In a pipeline a rank has 1 / pp of the blocks and the last one the head, too, by which all go; they wait
(pp - 1) / (stages a rank x microbatches) of their time, and FSDP gathers and reduces once a step. Context parallelism
passes keys and values of every block on, expert parallelism the tokens of every block to their experts and back.
Not modelled: stragglers, input pipelines, kernel launches, overlap in detail. A range that holds for most jobs is wide.
Sources: collectives' volumes as in NCCL's documentation of bus bandwidth (ring algorithms); the four all-reduces of a
layer under tensor parallelism, Megatron-LM (arXiv 1909.08053), section 3; bubbles of schedules, Narayanan et al.
(arXiv 2104.04473), section 2.2.
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
# Keys and values forward, both again and their gradients backward; each as wide as hidden states at most.
RINGS_A_BLOCK = 6
# Tokens to their experts and back, forward and backward.
ALL_TO_ALLS_A_BLOCK = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one micro-batch of one sequence does on one GPU, and the model's sizes in bytes.

    `traffic_bytes` go to and from memory. Parameters, gradients and states are in the dtype that is computed with; what
    is kept of them is `wider` times as large. `expert_bytes` of the parameters are experts'.
    """

    forward_flops: int
    backward_flops: int
    block_flops: int
    traffic_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    blocks: int
    hidden_bytes: int
    expert_bytes: int = 0
    experts_a_token: int = 1
    wider: int = 1

    @property
    def kept_bytes(self) -> int:
        """What a checkpoint of the job holds."""
        return (self.parameter_bytes + self.state_bytes) * self.wider


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


def work_of(graph: StepGraph, config, *, batch: int = 1, wider: int = 1) -> Work:
    """The work of a sequence, from a step of `batch` of them, one iteration, recorded with `decouple_saves`."""
    import numpy as np

    from metapeak.tracer.flops import operation_flops
    from metapeak.tracer.liveness import Category, Phase

    flops, phase = operation_flops(graph), np.asarray(graph.phase)
    blocks = tuple(block + "." for block in graph.block_names)
    inside = np.array([graph.module_names[module].startswith(blocks) for module in graph.module]) & bool(blocks)
    birth, nbytes, category = np.asarray(graph.birth), np.asarray(graph.nbytes), np.asarray(graph.category)
    computed = np.isin(phase[np.minimum(birth, len(phase) - 1)], [Phase.FORWARD, Phase.BACKWARD])
    owners = np.array([graph.module_names[owner].endswith(".experts") for owner in graph.owner], dtype=bool)
    text = getattr(config, "get_text_config", lambda: config)()
    return Work(
        forward_flops=int(flops[phase == Phase.FORWARD].sum()) // batch,
        backward_flops=int(flops[phase == Phase.BACKWARD].sum()) // batch,
        block_flops=int(flops[(phase == Phase.FORWARD) & inside].sum()) // batch,
        traffic_bytes=2 * int(nbytes[computed].sum()) // batch,
        parameter_bytes=int(nbytes[category == Category.PARAMETER].sum()),
        gradient_bytes=int(nbytes[category == Category.GRADIENT].sum()),
        state_bytes=int(nbytes[category == Category.OPTIMIZER_STATE].sum()),
        blocks=len(graph.block_names),
        hidden_bytes=2 * (getattr(text, "hidden_size", None) or 0),
        expert_bytes=int(nbytes[(category == Category.PARAMETER) & owners].sum()),
        experts_a_token=getattr(text, "num_experts_per_tok", None) or 1,
        wider=wider,
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
    # Of a pipeline the last rank is the slowest: what is no block, the head above all, is its own.
    rest = 1 - work.block_flops / max(work.forward_flops, 1)
    stage = (1 - rest) / one.pp + rest if one.pp > 1 else 1
    share = one.batch_size / (one.tp * one.cp) * stage
    again = 1 + (work.block_flops / max(flops, 1) if one.checkpointing != "none" else 0)
    compute = _range(flops * share, peak, FLOPS_REACHED)
    memory = _range(work.traffic_bytes * share * again, gpu.bandwidth_bytes, BANDWIDTH_REACHED)
    gathers = _messages(work, one, gpu, fabric)
    inner = _inner_messages(work, one, gpu, fabric, seq_len)
    states = 2 * work.wider * (work.parameter_bytes + work.gradient_bytes + work.state_bytes)
    optimizer = _range(states / (one.dp_shard * one.cp * one.tp * one.pp), gpu.bandwidth_bytes, BANDWIDTH_REACHED)
    every, once = ((0.0, 0.0), gathers) if one.pp > 1 else (gathers, (0.0, 0.0))
    parts = {"arithmetic": compute, "memory": memory, "messages": every}
    virtual = int((one.schedule or "").partition(":")[2] or 1)
    rounds = one.grad_accum + (one.pp - 1) / virtual
    least = rounds * (max(part[0] for part in parts.values()) + inner[0])
    most = rounds * (sum(part[1] for part in parts.values()) + inner[1])
    return StepTime(
        seconds=(max(least, once[0]) + optimizer[0], most + once[1] + optimizer[1]),
        bound="messages" if once[0] > least else max(parts, key=lambda name: parts[name][0]),
    )


def _messages(work: Work, one: Candidate, gpu: Gpu, fabric: Sequence[float]) -> tuple[float, float]:
    """Seconds of FSDP's gathers and reductions, and of the replicas', each done once: (least, most)."""
    shards, replicas = one.dp_shard * one.cp, one.dp_replicate
    # Spread experts are not gathered from the ranks that hold others.
    spread = work.expert_bytes / max(work.parameter_bytes, 1) * (1 - 1 / one.ep)
    parameters = work.parameter_bytes * (1 - spread) / (one.tp * one.pp)
    gradients = work.gradient_bytes * (1 - spread) / (one.tp * one.pp)
    sharded = (2 * parameters + gradients) * (shards - 1) / shards
    replicated = 2 * gradients / shards * (replicas - 1) / replicas
    return tuple(
        sharded / _rate(gpu, one.tp * shards, fabric, end)
        + replicated / _rate(gpu, one.tp * shards * replicas, fabric, end)
        for end in (1, 0)
    )


def _inner_messages(work: Work, one: Candidate, gpu: Gpu, fabric: Sequence[float], seq_len: int) -> tuple[float, float]:
    """Seconds of the messages that stand in the way of a micro-batch's layers, (least, most)."""
    hidden = one.batch_size * seq_len * work.hidden_bytes / one.cp
    blocks = work.blocks / one.pp
    tensor = 2 * (one.tp - 1) / one.tp * ALL_REDUCES_A_BLOCK * blocks * hidden
    ring = RINGS_A_BLOCK * (one.cp - 1) * blocks * hidden / one.tp
    experts = ALL_TO_ALLS_A_BLOCK * (one.ep - 1) / one.ep * blocks * hidden * work.experts_a_token
    stages = 2 * hidden if one.pp > 1 else 0.0
    return tuple(
        tensor / _rate(gpu, one.tp, fabric, end)
        + ring / _rate(gpu, one.tp * one.cp, fabric, end)
        + (experts / _rate(gpu, one.ep, fabric, end) if one.ep > 1 else 0.0)
        + stages / _rate(gpu, one.gpus, fabric, end)
        for end in (1, 0)
    )


def _rate(gpu: Gpu, span: int, fabric: Sequence[float], end: int) -> float:
    """Bytes a second in a group of neighbours: the card's link in a machine, else the slower of it and the fabric."""
    rate = gpu.link_bytes if span <= MACHINE_GPUS else min(gpu.link_bytes, fabric[end])
    return rate * LINK_REACHED[end]


def _range(amount: float, rate: float, reached: Sequence[float]) -> tuple[float, float]:
    return amount / rate / reached[1], amount / rate / reached[0]
