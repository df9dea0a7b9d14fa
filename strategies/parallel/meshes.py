"""The device mesh of a layout: one for all strategies, so that what each of them shards can be combined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metapeak.strategies.parallel.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The axis of all ranks that FSDP shards over, where there are two of them. Source: torchtitan.
_SHARDS = "dp_shard_cp"


def layout_mesh(layout: Layout) -> DeviceMesh:
    """The mesh of the current process group with the layout's axes; of degree 1 only dp_shard, which FSDP needs."""
    from metapeak.tracer.distributed import mesh_of

    return mesh_of({axis: degree for axis, degree in layout.degrees.items() if degree > 1 or axis == "dp_shard"})


def data_parallel_mesh(layout: Layout) -> DeviceMesh:
    """The part that shards and their replicas lie on: dp_shard with cp, or (dp_replicate, that) for HSDP.

    Shards over one rank with replicas are HSDP, too, as in torchtitan: the axis is there with degree 1.
    """
    from torch.distributed.device_mesh import DeviceMesh

    mesh = layout_mesh(layout)
    shards = mesh["dp_shard"] if layout.cp == 1 else mesh["cp"]
    if layout.cp > 1 and layout.dp_shard > 1:
        shards = mesh["dp_shard", "cp"]._flatten(_SHARDS)
    if layout.dp_replicate == 1:
        return mesh if mesh.mesh_dim_names == shards.mesh_dim_names else shards
    if layout.cp == 1:
        return mesh["dp_replicate", "dp_shard"]
    return DeviceMesh._concatenate([mesh["dp_replicate"], shards])


def expert_mesh(layout: Layout) -> DeviceMesh:
    """The same ranks as experts see them, with the axes efsdp and ep.

    Source: transformers 5.24 distributed/utils.py (initialize_distributed_mesh).
    """
    from metapeak.tracer.distributed import mesh_of

    outer = {axis: getattr(layout, axis) for axis in ("pp", "dp_replicate") if getattr(layout, axis) > 1}
    return mesh_of({**outer, "efsdp": layout.efsdp, "ep": layout.ep})


def expert_data_parallel_mesh(layout: Layout) -> DeviceMesh:
    """The part of `expert_mesh` that shards of experts and their replicas lie on."""
    mesh = expert_mesh(layout)
    return mesh["dp_replicate", "efsdp"] if layout.dp_replicate > 1 else mesh["efsdp"]


def same_batch_mesh(layout: Layout) -> DeviceMesh:
    """The ranks that hold the same batch: tp, or this rank alone."""
    from metapeak.tracer.distributed import mesh_of

    if layout.tp > 1:
        return layout_mesh(layout)["tp"]
    return mesh_of({"others": layout.world_size, "alone": 1})["alone"]


def replica_mesh(layout: Layout) -> DeviceMesh:
    """The part that DDP's replicas lie on."""
    return layout_mesh(layout)["dp_replicate" if layout.dp_replicate > 1 else "dp_shard"]
