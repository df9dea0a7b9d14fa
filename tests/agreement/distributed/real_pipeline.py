"""A real rank of a pipeline: torch's stages and schedules over gloo, with what was alive at every action.

Shares no code with metapeak. What gloo does and NCCL does not is kept out: its sends hold their tensors until somebody
waits, so a copy that nobody counts is sent; receives are waited for at once.
"""

import contextlib
import gc

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.distributed_c10d import _world
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import _disable_current_modes

from tests.agreement.distributed.cases import blocks
from tests.agreement.distributed.real_techniques import (
    _meshes,
    _part_of_sequence,
    _run_cp,
    _run_ep,
    _run_tp,
    _torchtitan_plan,
    spread_experts,
)

PP = 2  # of a pipeline whose stages are shared


class Part(torch.nn.Module):
    """Blocks `begin` to `end` of a model, cut out by hand. `parts` is the mesh along which hidden states are cut."""

    def __init__(self, model, begin, end, parts=None):
        super().__init__()
        inner = model.model
        self.first, self.last, self.parts = begin == 0, end == len(inner.layers), parts
        inner.layers = torch.nn.ModuleList(list(inner.layers)[begin:end])
        inner.config.num_hidden_layers = end - begin
        self.inner = inner
        self.head = model.lm_head if self.last else None
        if not self.first:
            inner.embed_tokens = None
        if not self.last:
            inner.norm = torch.nn.Identity()

    def forward(self, given, **positions):
        if self.parts is not None and not self.first:
            given = DTensor.from_local(given, self.parts, [Shard(1)], run_check=False)
        name = "input_ids" if self.first else "inputs_embeds"
        hidden = self.inner(**{name: given}, **positions, use_cache=False).last_hidden_state
        if self.last:
            return self.head(hidden)
        return hidden.to_local() if self.parts is not None else hidden


def _loss(logits, labels):
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(logits, labels, vocab_size=logits.shape[-1])


def _loss_of_part(logits, labels):
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(logits, None, vocab_size=logits.shape[-1], shift_labels=labels)


def _part(case, begin, end, mesh):
    """A stage's module on this rank: cut by what is inside stages, then sharded."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    model = case.build("cpu")
    config = model.config
    if case.inside == "tp":
        parallelize_module(model, mesh["tp"], _torchtitan_plan(model, loss_parallel=True))
        return Part(model, begin, end, parts=mesh["tp"]), config
    if case.inside == "cp":
        from accelerate.big_modeling import _attach_context_parallel_hooks

        _attach_context_parallel_hooks(model)
    if case.inside == "ep":
        spread_experts(model, 2, _expert_mesh(), _meshes(others=4, alone=1)["alone"])
    part = Part(model, begin, end)
    if case.inside:
        shards = mesh["cp" if case.inside == "cp" else "dp_shard"]
        for block in blocks(part):
            fully_shard(block, mesh=shards, reshard_after_forward=False)
        fully_shard(part, mesh=shards, reshard_after_forward=False)
    return part, config


def _expert_mesh():
    return _meshes(pp=PP, efsdp=1, ep=2)


def _stages(case, place, pp, group, mesh):
    count = len(case.sizes)
    edges = [sum(case.sizes[:stage]) for stage in range(count + 1)]
    is_v = case.class_name in ("ZBVZeroBubble", "DualPipeV")
    indices = [place, count - 1 - place] if is_v else list(range(place, count, pp))
    stages = []
    for index in indices:
        part, config = _part(case, edges[index], edges[index + 1], mesh)
        tokens = case.tokens // (2 if case.inside == "cp" else 1)
        own = tokens // (2 if case.inside == "tp" else 1)
        hidden = torch.empty(case.batch_size, own, config.hidden_size, device="meta", requires_grad=True)
        logits = torch.empty(case.batch_size, tokens, config.vocab_size, device="meta", requires_grad=True)
        ids = torch.empty(case.batch_size, tokens, dtype=torch.int64, device="meta")
        stage = pipelining.PipelineStage(
            part,
            index,
            count,
            torch.device("cpu"),
            input_args=hidden if index else ids,
            output_args=hidden if index < count - 1 else logits,
            group=group,
        )
        stages.append(stage)
    return stages


def train_pipeline(case, watch, make_optimizer, iterations=2):
    """Two steps as this rank: the RankRun of `watch`, its phases the actions."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh, place, pp = None, rank, world
    if case.inside:
        axis = "dp_shard" if case.inside == "ep" else case.inside
        mesh, place, pp = _meshes(pp=PP, **{axis: world // PP}), rank // (world // PP), PP
    stages = _stages(case, place, pp, mesh["pp"].get_group() if mesh else None, mesh)
    # Ranks of one stage do the same collectives; others do not.
    across = [dist.group.WORLD]
    if mesh is not None:
        across += [mesh["pp"].get_group(), _expert_mesh()["pp"].get_group()]
        across.append(_meshes(others=world, alone=1)["others"].get_group())
    watch.groups = [group for group in _world.pg_map if group not in across] if mesh else []
    data = case.batch()
    for tensor in data.values():
        watch.add(tensor)
    for stage in stages:
        for tensor in (*stage.submod.parameters(), *stage.submod.buffers()):
            watch.add(getattr(tensor, "_local_tensor", tensor))
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = make_optimizer(parameters)
    now = [0]
    for stage in stages:
        _watch_actions(stage, watch, now)
    kind = schedules.get_schedule_class(case.class_name)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    loss = _loss_of_part if case.inside == "cp" else _loss
    schedule = kind(stages[0] if single else stages, case.microbatches, loss_fn=loss)
    last = len(case.sizes) - 1 in [stage.stage_index for stage in stages]
    schedules._batch_p2p = _at_once
    gc.collect()
    gc.disable()
    try:
        with _running(case, mesh), watch, watch.resizes(), torch.autograd.set_multithreading_enabled(False):
            for iteration in range(1, iterations + 1):
                now[0] = iteration
                watch.begin((iteration, "start"))
                ids, targets, positions = _given(case, data, mesh)
                schedule.step(
                    *((ids,) if place == 0 else ()),
                    **positions,
                    target=targets if last else None,
                    losses=[] if last else None,
                    return_outputs=False,
                )
                del ids, targets, positions
                watch.begin((iteration, "optimizer"))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            watch.begin(None)
    finally:
        gc.enable()
    return watch.run


def _running(case, mesh):
    if case.inside == "tp":
        return _run_tp(loss_parallel=True)
    if case.inside == "ep":
        return _run_ep()
    return _run_cp(mesh=mesh["cp"]) if case.inside == "cp" else contextlib.nullcontext()


def _given(case, data, mesh):
    """(ids, targets, what every stage is given besides) of a step."""
    if case.inside != "cp":
        return data["input_ids"], data["labels"], {}
    part = _part_of_sequence(data, mesh=mesh["cp"])
    return part["input_ids"], part["shift_labels"], {"position_ids": part["position_ids"]}


def _watch_actions(stage, watch, now):
    names = {
        "forward_one_chunk": "F",
        "backward_one_chunk": "B",
        "backward_weight_one_chunk": "W",
        "perform_reduce_grad": "R",
    }

    def watched(name, original):
        def call(*args, **kwargs):
            kind = names[name] if kwargs.get("full_backward", True) else "I"
            microbatch = -1 if kind == "R" else args[0]
            watch.begin((now[0], f"{stage.stage_index}{kind}{microbatch}"))
            return original(*args, **kwargs)

        return call

    for name in names:
        setattr(stage, name, watched(name, getattr(stage, name)))


_sending = []


def _at_once(operations, desc=None):
    """Sends copies that are kept for good, then waits for what is received."""
    with _disable_current_modes():
        for one in operations:
            if one.op is dist.isend:
                copied = one.tensor.detach().clone()
                _sending.append((copied, dist.isend(copied, group=one.group, group_dst=one.group_peer)))
        for one in operations:
            if one.op is dist.irecv:
                buffer = torch.empty_like(one.tensor)
                dist.irecv(buffer, group=one.group, group_src=one.group_peer).wait()
                one.tensor.detach().copy_(buffer)
    return []
