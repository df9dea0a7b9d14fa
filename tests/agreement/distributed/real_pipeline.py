"""A real rank of a pipeline: torch's stages and schedules over gloo, with what was alive at every action.

Shares no code with metapeak. What gloo does and NCCL does not is kept out: its sends hold their tensors until somebody
waits, so a copy that nobody counts is sent; receives are waited for at once.
"""

import gc

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules
from torch.utils._python_dispatch import _disable_current_modes

from tests.agreement.distributed.pipelines import TOKENS, llama

PP = 2  # of a sharded pipeline


class Part(torch.nn.Module):
    """Blocks `begin` to `end` of a Llama, cut out by hand."""

    def __init__(self, blocks, begin, end):
        super().__init__()
        model = llama("cpu", blocks)
        inner = model.model
        inner.layers = torch.nn.ModuleList(list(inner.layers)[begin:end])
        inner.config.num_hidden_layers = end - begin
        self.first, self.last = begin == 0, end == blocks
        self.inner = inner
        self.head = model.lm_head if self.last else None
        if not self.first:
            inner.embed_tokens = None
        if not self.last:
            inner.norm = torch.nn.Identity()

    def forward(self, given):
        name = "input_ids" if self.first else "inputs_embeds"
        hidden = self.inner(**{name: given}, use_cache=False).last_hidden_state
        return self.head(hidden) if self.last else hidden


def _loss(logits, labels):
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(logits, labels, vocab_size=101)


def _stages(case, place, pp, group, mesh):
    count = len(case.sizes)
    edges = [sum(case.sizes[:stage]) for stage in range(count + 1)]
    is_v = case.class_name in ("ZBVZeroBubble", "DualPipeV")
    indices = [place, count - 1 - place] if is_v else list(range(place, count, pp))
    hidden = torch.empty(case.batch_size, TOKENS, 36, device="meta", requires_grad=True)
    logits = torch.empty(case.batch_size, TOKENS, 101, device="meta", requires_grad=True)
    ids = torch.empty(case.batch_size, TOKENS, dtype=torch.int64, device="meta")
    stages = []
    for index in indices:
        part = Part(edges[-1], edges[index], edges[index + 1])
        if mesh is not None:
            from torch.distributed.fsdp import fully_shard

            for block in part.inner.layers:
                fully_shard(block, mesh=mesh, reshard_after_forward=False)
            fully_shard(part, mesh=mesh, reshard_after_forward=False)
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
    mesh = init_device_mesh("cpu", (PP, world // PP), mesh_dim_names=("pp", "dp_shard")) if case.sharded else None
    place, pp = (rank // (world // PP), PP) if case.sharded else (rank, world)
    stages = _stages(
        case, place, pp, mesh["pp"].get_group() if mesh else None, mesh["dp_shard"] if mesh is not None else None
    )
    watch.groups = [mesh["dp_shard"].get_group()] if mesh is not None else []
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
    schedule = kind(stages[0] if single else stages, case.microbatches, loss_fn=_loss)
    indices = [stage.stage_index for stage in stages]
    schedules._batch_p2p = _at_once
    gc.collect()
    gc.disable()
    try:
        with watch, watch.resizes(), torch.autograd.set_multithreading_enabled(False):
            for iteration in range(1, iterations + 1):
                now[0] = iteration
                watch.begin((iteration, "start"))
                last = len(case.sizes) - 1 in indices
                schedule.step(
                    *((data["input_ids"],) if 0 in indices else ()),
                    target=data["labels"] if last else None,
                    losses=[] if last else None,
                    return_outputs=False,
                )
                watch.begin((iteration, "optimizer"))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            watch.begin(None)
    finally:
        gc.enable()
    return watch.run


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
