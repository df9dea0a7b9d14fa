"""What a rank of a candidate holds at least, instant by instant: shares of steps recorded on one GPU.

What it changes: nothing; it says which candidates need not be simulated.
Where each byte comes from: two recorded steps, of batch 2 and 3, give the bytes of every storage as a + b x batch where
they are the same operations (size_functions.py); in between stands nothing fitted. Of those bytes a rank has
    model states and the optimizer's temporaries     1 / (dp_shard x cp x tp x pp)
    activations and temporaries inside blocks        1 / (tp x cp x pp), of its own micro-batch
    those outside of blocks, logits above all        1 / cp (a pipeline's last rank has them), 1 / tp with loss_parallel
    parameters that FSDP has gathered                the root unit and a block, in a pipeline the whole stage
    gradients that FSDP has not reduced yet          the root unit's
    gradients of earlier micro-batches               all, where there are several
    in a pipeline, on the first rank                 what blocks keep for backward, of min(pp, microbatches)
and the overheads of its process. A real rank has more: buffers of messages, what no degree cuts, holes. So a candidate
whose bound is over the GPU cannot fit, and one whose bound is not may fail its simulation still.
Not modelled: a batch of 1 runs a few copies less than larger ones; its bound may be above by these (STEP_OF_ONE).
Sources: FSDP2's units in memory, fsdp2_rewrite.py; microbatches in flight of 1F1B, torch's schedules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from metapeak.strategies.planning.candidates import Candidate, Model
from metapeak.strategies.planning.step_time import Work, work_of
from metapeak.strategies.settings import options_of, resolve
from metapeak.tracer.device.overheads import overheads
from metapeak.tracer.gpus import Gpu
from metapeak.tracer.liveness import Category, Liveness, Phase
from metapeak.tracer.simulation import Option

if TYPE_CHECKING:
    from metapeak.tracer.graph import StepGraph
    from metapeak.tracer.spec import StepSpec

BATCHES = (2, 3)
# A bound of a batch of 1 is believed with this much to spare, see above.
STEP_OF_ONE = 0.95
_STATES = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE)


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """A policy's step at one batch size: storages and what is known of their instants, plain columns.

    `kept` are bytes of blocks alive at the end of forward, for backward.
    """

    birth: np.ndarray
    death: np.ndarray
    nbytes: np.ndarray
    category: np.ndarray
    inside: np.ndarray
    phase: np.ndarray
    kept: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """One recorded step as columns by policy, its work a sequence, the model's limits and its units' bytes."""

    batch: int
    columns: Mapping[str, Columns]
    work: Work
    model: Model
    seq_len: int | None
    root_bytes: int
    block_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Instants:
    """Where a policy's peak can be: columns [instants] of bytes that a rank has shares of. `inside` blocks and
    `outside` are (base, slope) of base + slope x batch, so is `kept`.
    """

    gradients: np.ndarray
    root_gradients: np.ndarray
    optimizer: np.ndarray
    inside: tuple[np.ndarray, np.ndarray]
    outside: tuple[np.ndarray, np.ndarray]
    is_step: np.ndarray
    kept: tuple[float, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """The bound of every candidate of one method, sharded or not. `exact`: whether the two steps were the same;
    `logits_cut`: with loss_parallel.
    """

    recorded: Recorded
    instants: Mapping[str, Instants]
    exact: bool
    logits_cut: bool = False

    def state_bytes(self, one: Candidate) -> float:
        """Parameters and optimizer states of a rank, the mean of a pipeline's."""
        work = self.recorded.work
        stored = (work.parameter_bytes + work.state_bytes) * self.recorded.work.wider
        return stored / (one.dp_shard * one.cp * one.tp * one.pp)

    def least_bytes(self, one: Candidate, gpu: Gpu) -> float:
        """Bytes of the device that a rank of the candidate takes at least."""
        parts, work = self.instants[one.checkpointing], self.recorded.work
        ranks, cut = one.dp_shard * one.cp * one.tp * one.pp, one.tp * one.cp * one.pp
        micro = one.batch_size
        rest = _at(parts.inside, micro) / cut
        rest = rest + _at(parts.outside, micro) / (one.cp * (one.tp if self.logits_cut else 1))
        gathered = np.where(parts.is_step, 0, self._gathered(one))
        gradients = work.gradient_bytes if one.grad_accum > 1 else parts.gradients
        live = (gradients + parts.optimizer) * work.wider / ranks + rest + gathered
        if one.dp_shard * one.cp > 1 and one.pp == one.ep == 1:
            live = live + parts.root_gradients / one.tp
        most = float(live.max())
        if one.pp > 1:
            kept = _at(parts.kept, micro) * min(one.pp, one.grad_accum) / cut
            most = max(most, kept + self._gathered(one))
        groups = (one.gpus,) if one.gpus > 1 else ()
        bound = self.state_bytes(one) + most * (STEP_OF_ONE if micro == 1 else 1)
        return bound + overheads(gpu, groups).low_bytes

    def _gathered(self, one: Candidate) -> float:
        if one.dp_shard * one.cp == 1:
            return 0.0
        if one.ep > 1:
            return self.recorded.root_bytes / one.tp
        whole = self.recorded.work.parameter_bytes / one.pp
        return (whole if one.pp > 1 else self.recorded.root_bytes + self.recorded.block_bytes) / one.tp


def _at(affine: tuple, batch: int):
    """base + slope x batch."""
    return affine[0] + affine[1] * batch


def record_step(
    reference: str,
    given: Sequence[Mapping[str, Option]],
    method: str,
    policies: Sequence[str],
    *,
    sharded: bool,
    batch: int,
) -> Recorded:
    """The step of `batch` sequences on one GPU under a method; `sharded`: as FSDP computes it. Raises as `simulate`."""
    from metapeak.strategies.checkpoint_policies import Nothing, parse_policy
    from metapeak.strategies.gradient_checkpointing import GradientCheckpointing
    from metapeak.strategies.parallel.fsdp1 import FSDP1
    from metapeak.strategies.parallel.fsdp2 import FSDP2
    from metapeak.strategies.parallel.verify import unsharded_step
    from metapeak.strategies.prepared import plain_step_graph
    from metapeak.strategies.request import model_spec, model_strategies, step_spec, strategies_of

    chosen = {"method": method, "batch_size": batch, "grad_accum": 1, "checkpointing": "none"}
    options = resolve(*given, options_of({**chosen, **({"dp_shard": 2} if sharded else {})}, "plan"))
    fsdp = next((one for one in strategies_of(options) if isinstance(one, (FSDP1, FSDP2))), None)
    step = replace(step_spec(options), iterations=1)
    if fsdp is not None:
        graph = unsharded_step(reference, fsdp, options, step)
    else:
        graph = plain_step_graph(model_spec(reference, options), step, model_strategies(options))
    liveness, columns = graph.liveness(), {}
    for text in policies:
        policy = parse_policy(text)
        of = liveness if isinstance(policy, Nothing) else GradientCheckpointing(policy=policy).rewrite(liveness, graph)
        columns[text] = _columns(of, graph)
    root, block = _units(graph)
    model, config, seq_len = _model(reference, options, graph, step)
    wider = 1
    if fsdp is not None and fsdp.upcast != "none" and fsdp.param_dtype != "float32" and method == "full":
        wider = 2  # float32 shards of parameters that are computed with in 16 bits
    return Recorded(
        batch=batch, columns=columns, work=work_of(graph, config, batch=batch, wider=wider), model=model,
        seq_len=seq_len, root_bytes=root, block_bytes=block,
    )  # fmt: skip


def _columns(liveness: Liveness, graph: StepGraph) -> Columns:
    blocks = tuple(name + "." for name in graph.block_names)
    inside = np.array([name.startswith(blocks) for name in liveness.module_names], dtype=bool) & bool(blocks)
    forward = np.flatnonzero(liveness.op_phase == Phase.FORWARD)
    end = int(forward[-1]) + 1 if len(forward) else 0
    alive = (liveness.birth < end) & (liveness.death > end) & (liveness.category == Category.ACTIVATION)
    return Columns(
        birth=liveness.birth,
        death=liveness.death,
        nbytes=liveness.nbytes,
        category=liveness.category,
        inside=inside[liveness.module],
        phase=liveness.op_phase,
        kept=int(liveness.nbytes[alive & inside[liveness.module]].sum()),
    )


def _units(graph: StepGraph) -> tuple[int, int]:
    """(bytes of parameters outside blocks, of the smallest block)."""
    names, category, nbytes = graph.module_names, np.asarray(graph.category), np.asarray(graph.nbytes)
    owners = np.asarray(graph.owner)
    parameters = np.flatnonzero(category == Category.PARAMETER)
    of_block = dict.fromkeys(graph.block_names, 0)
    root = 0
    for row in parameters:
        owner = names[owners[row]]
        block = next((name for name in of_block if owner == name or owner.startswith(name + ".")), None)
        if block is None:
            root += int(nbytes[row])
        else:
            of_block[block] += int(nbytes[row])
    return root, min(of_block.values(), default=0)


def _model(reference: str, options: Mapping[str, Option], graph: StepGraph, step: StepSpec):
    """(limits of the model, its config, tokens of a sequence or None)."""
    from metapeak.strategies.request import model_spec
    from metapeak.tracer.batches import make_batch
    from metapeak.tracer.models import build, resolve_model

    spec = model_spec(reference, options)
    resolved = resolve_model(spec)
    built = build(resolved, dtype=spec.dtype)
    module = built.module
    tensors = make_batch(module, resolved.task, step).tensors if built.batch is None else {}
    config = getattr(module, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    experts = {part.num_experts for part in module.modules() if isinstance(getattr(part, "num_experts", None), int)}
    own = resolved.package is None and resolved.factory is None
    limits = Model(
        blocks=len(graph.block_names),
        heads=getattr(text, "num_attention_heads", None) or 1,
        experts=experts.pop() if own and len(experts) == 1 and getattr(module, "ep_plan", None) else 0,
        has_tp=own and bool(getattr(module, "tp_plan", None)),
        is_causal_lm=own and resolved.task == "causal-lm",
    )
    ids = tensors.get("input_ids")
    return limits, config, ids.shape[1] if ids is not None else None


def profile(first: Recorded, second: Recorded, *, logits_cut: bool = False) -> Profile:
    """The bounds that two steps give; where they are not the same operations, the first grows as its batch does."""
    pairs = {policy: (columns, second.columns[policy]) for policy, columns in first.columns.items()}
    same = {
        policy: len(a.birth) == len(b.birth) and (a.birth == b.birth).all() and (a.death == b.death).all()
        for policy, (a, b) in pairs.items()
    }
    batches = first.batch, second.batch
    instants = {
        policy: _instants(a, b, batches) if same[policy] else _instants(a, None, batches)
        for policy, (a, b) in pairs.items()
    }
    return Profile(recorded=first, instants=instants, exact=all(same.values()), logits_cut=logits_cut)


def _instants(a: Columns, b: Columns | None, batches: tuple[int, int]) -> Instants:
    count = len(a.phase)
    dies = np.zeros(count + 2, dtype=bool)
    dies[a.death] = True
    last = np.flatnonzero(np.append(dies[1:count], True))  # live bytes grow while nothing dies

    def live(rows: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        change = np.zeros(count + 2)
        np.add.at(change, a.birth[rows], nbytes[rows])
        np.add.at(change, a.death[rows], -nbytes[rows])
        return np.cumsum(change)[last]

    def affine(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        one = live(rows, a.nbytes)
        slope = one / batches[0] if b is None else (live(rows, b.nbytes) - one) / (batches[1] - batches[0])
        return one - slope * batches[0], slope

    states = np.isin(a.category, _STATES)
    in_step = a.phase[np.minimum(a.birth, count - 1)] == Phase.OPTIMIZER
    is_step = a.phase[last] == Phase.OPTIMIZER
    gradients = a.category == Category.GRADIENT
    each = a.kept / batches[0] if b is None else (b.kept - a.kept) / (batches[1] - batches[0])
    found = Instants(
        gradients=live(gradients, a.nbytes),
        root_gradients=np.where(is_step, 0, live(gradients & ~a.inside, a.nbytes)),
        optimizer=live(in_step & ~states, a.nbytes),
        inside=affine(~states & ~in_step & a.inside),
        outside=affine(~states & ~in_step & ~a.inside),
        is_step=is_step,
        kept=(a.kept - each * batches[0], each),
    )
    return _undominated(found)


def _undominated(of: Instants) -> Instants:
    """Without the instants that another one is no lower than in every respect: they are not needed for the peak."""
    columns = np.stack(
        [of.gradients, of.root_gradients, of.optimizer, 1.0 - of.is_step]
        + [_at(one, batch) for one in (of.inside, of.outside) for batch in (1, 1 << 20)],
        axis=1,
    )
    kept: list[int] = []
    for row in np.argsort(-columns.sum(axis=1), kind="stable"):
        if not kept or not (columns[kept] >= columns[row]).all(axis=1).any():
            kept.append(int(row))
    return replace(
        of,
        gradients=of.gradients[kept],
        root_gradients=of.root_gradients[kept],
        optimizer=of.optimizer[kept],
        inside=(of.inside[0][kept], of.inside[1][kept]),
        outside=(of.outside[0][kept], of.outside[1][kept]),
        is_step=of.is_step[kept],
    )
