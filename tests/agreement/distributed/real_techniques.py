"""Real techniques: what spreads a model over processes with gloo between them, by the libraries' own means.

Shares no code with metapeak. DISTRIBUTE has a function of the model and the options by technique, RUNNING a context for
the steps, PART_OF what a rank takes of the batch.
"""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from tests.agreement.distributed.cases import blocks


def _mesh(axis):
    return _meshes(**{axis: dist.get_world_size()})


@functools.cache
def _meshes(**degrees):
    """A mesh with these axes; the same one for the same axes."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def _with_shards(axis, degree):
    """A mesh of dp_shard and another axis over all ranks."""
    return _meshes(dp_shard=dist.get_world_size() // degree, **{axis: degree})


def _dtypes(names):
    return {name: getattr(torch, dtype) for name, dtype in names.items()}


def _fsdp2(model, reshard_after_forward=None, mesh=None, **dtypes):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {"mesh": mesh or _mesh("dp_shard"), "mp_policy": MixedPrecisionPolicy(**_dtypes(dtypes))}
    if reshard_after_forward is not None:
        options["reshard_after_forward"] = reshard_after_forward
    for block in blocks(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _fsdp1(model, sharding="FULL_SHARD", use_orig_params=True, **dtypes):
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import CustomPolicy

    units = {id(block) for block in blocks(model)}
    if not all(parameter.requires_grad for parameter in model.parameters()):
        # Trained leaves beside frozen ones are units of their own, as PEFT's fsdp_auto_wrap_policy has it.
        units |= {
            id(part)
            for part in model.modules()
            if not list(part.children()) and getattr(getattr(part, "weight", None), "requires_grad", False)
        }
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[sharding],
        auto_wrap_policy=CustomPolicy(lambda part: id(part) in units),
        mixed_precision=MixedPrecision(**_dtypes(dtypes)) if dtypes else None,
        use_orig_params=use_orig_params,
        device_mesh=_mesh("dp_shard"),
        device_id=torch.device("cpu"),
    )


def _ddp(model, **options):
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, broadcast_buffers=False, **options)


def _tp(model, sequence_parallel=False, loss_parallel=False, degree=None):
    from torch.distributed.tensor.parallel import parallelize_module
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh = _mesh("tp") if degree is None else _with_shards("tp", degree)["tp"]
    if sequence_parallel:
        parallelize_module(model, mesh, _torchtitan_plan(model, loss_parallel))
        return model if degree is None else _fsdp2(model, mesh=_with_shards("tp", degree)["dp_shard"])
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=dist.get_world_size()))
    if loss_parallel:
        del plan["lm_head.weight"], plan["lm_head"]
        parallelize_module(model, mesh, {"lm_head": _head(loss_parallel)})
    apply_tensor_parallelism(model, mesh, plan)
    return model


def _torchtitan_plan(model, loss_parallel):
    """torchtitan models/llama3/parallelize.py (apply_tp) with the names of transformers' Llama.

    Parts of the sequence stay DTensors between modules, so that positions are those of the whole sequence.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    part = {"output_layouts": Shard(1), "use_local_output": False}
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **part),
        "model.norm": SequenceParallel(),
        "lm_head": _head(loss_parallel),
    }
    for layer in range(len(model.model.layers)):
        block = f"model.layers.{layer}"
        plan |= {
            f"{block}.input_layernorm": SequenceParallel(),
            f"{block}.self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            f"{block}.self_attn.q_proj": ColwiseParallel(),
            f"{block}.self_attn.k_proj": ColwiseParallel(),
            f"{block}.self_attn.v_proj": ColwiseParallel(),
            f"{block}.self_attn.o_proj": RowwiseParallel(**part),
            f"{block}.post_attention_layernorm": SequenceParallel(),
            f"{block}.mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            f"{block}.mlp.gate_proj": ColwiseParallel(),
            f"{block}.mlp.up_proj": ColwiseParallel(),
            f"{block}.mlp.down_proj": RowwiseParallel(**part),
        }
    return plan


def _head(loss_parallel):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel

    return ColwiseParallel(
        output_layouts=Shard(-1) if loss_parallel else Replicate(), use_local_output=not loss_parallel
    )


def _run_tp(sequence_parallel=False, loss_parallel=False, degree=None):
    from torch.distributed.tensor.parallel import loss_parallel as kept_apart

    return kept_apart() if loss_parallel else contextlib.nullcontext()


def _cp_mesh(degree):
    return _with_shards("cp", degree or dist.get_world_size())


def _cp(model, rotation=None, degree=None):
    from accelerate.big_modeling import _attach_context_parallel_hooks

    _attach_context_parallel_hooks(model)
    return _fsdp2(model, mesh=_cp_mesh(degree)["dp_shard", "cp"]._flatten("dp_shard_cp"))


@contextlib.contextmanager
def _run_cp(rotation="allgather", degree=None, mesh=None):
    """torch's `context_parallel`, with kernels that the CPU has not: their results have the sizes of the GPU's."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotation)
    original = torch.nn.functional.scaled_dot_product_attention
    _efficient_attention_on_cpu()

    @functools.wraps(original)  # torch replaces it by name
    def efficient(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        run = torch.ops.aten._scaled_dot_product_efficient_attention
        return run(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]

    torch.nn.functional.scaled_dot_product_attention = efficient
    nothing = torch.zeros(2 * dist.get_world_size())
    try:
        with context_parallel(mesh or _cp_mesh(degree)["cp"], buffers=[nothing], buffer_seq_dims=[0]):
            yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = original


@functools.cache
def _efficient_attention_on_cpu():
    library = torch.library.Library("aten", "IMPL")
    for name in ("_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"):
        func = getattr(torch.ops.aten, name).default

        def kernel(*args, func=func, **kwargs):
            on_meta = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
            return tuple(
                torch.empty_strided(one.shape, one.stride(), dtype=one.dtype).zero_() if one is not None else None
                for one in func(*on_meta, **kwargs)
            )

        library.impl(name, kernel, "CPU")
    return library


def _part_of_sequence(data, rotation=None, degree=None, mesh=None):
    """Shifted labels and positions as the Hugging Face Trainer makes them, and this rank's part of everything."""
    from torch.distributed.tensor.experimental._context_parallel._attention import _context_parallel_buffers
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

    labels = torch.nn.functional.pad(data["labels"], (0, 1), value=-100)
    whole = {**data, "shift_labels": labels[:, 1:].contiguous()}
    del labels
    count, length = data["input_ids"].shape
    whole["position_ids"] = torch.arange(length).expand(count, -1)
    mesh = mesh or _cp_mesh(degree)["cp"]
    balancer = _HeadTailLoadBalancer(length, mesh.size(), "cpu")
    parts = _context_parallel_buffers(mesh, list(whole.values()), [1] * len(whole), balancer)
    return dict(zip(whole, parts))


def _ep(model, degree=None):
    """transformers' own, with FSDP2 for what is no expert."""
    ranks = dist.get_world_size()
    degree = degree or ranks
    dense = _meshes(fsdp=ranks, tp=1)
    spread_experts(model, ranks, _meshes(efsdp=ranks // degree, ep=degree), dense["tp"])
    return _fsdp2(model, mesh=dense["fsdp"])


def spread_experts(model, ranks, mesh, same_batch):
    """Give each of `mesh`'s ep ranks its experts, and shard them over efsdp; `ranks` of both in all."""
    from torch.distributed.fsdp import fully_shard
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    degree = mesh["ep"].size()
    _, plan, _ = model._resolve_parallel_plans(DistributedConfig(fsdp_size=ranks, ep_size=degree))
    apply_expert_parallelism(model, mesh["ep"], same_batch, plan)
    for block in blocks(model):
        fully_shard(block.mlp.experts, mesh=mesh["efsdp"], reshard_after_forward=True)
        block.mlp.experts.set_gradient_divide_factor(float(ranks))
        block.mlp.experts.set_force_sum_reduction_for_comms(degree < ranks)


@contextlib.contextmanager
def _run_ep(degree=None):
    """Row i of n candidates chooses i * k + j mod n as its j-th of k: every expert is chosen equally often."""
    original = torch.topk

    def balanced(input, k, dim=-1):
        values, indices = original(input, k, dim=dim)
        with _disable_current_modes():
            indices.data.copy_((torch.arange(indices.numel()) % input.shape[dim]).view(indices.shape))
        return values, indices

    torch.topk = balanced
    try:
        yield
    finally:
        torch.topk = original


DISTRIBUTE = {"fsdp2": _fsdp2, "fsdp1": _fsdp1, "ddp": _ddp, "tp": _tp, "cp": _cp, "ep": _ep}
RUNNING = {"tp": _run_tp, "cp": _run_cp, "ep": _run_ep}
PART_OF = {"cp": _part_of_sequence}
