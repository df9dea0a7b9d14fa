"""The device mesh of a layout: one for all strategies, so that what each of them shards can be combined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from metapeak.strategies.parallel.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def layout_mesh(layout: Layout) -> DeviceMesh:
    """The mesh of the current process group with the layout's axes; of degree 1 only dp_shard, which FSDP needs."""
    from metapeak.tracer.distributed import mesh_of

    return mesh_of({axis: degree for axis, degree in layout.degrees.items() if degree > 1 or axis == "dp_shard"})


def data_parallel_mesh(layout: Layout) -> DeviceMesh:
    """The part that shards and their replicas lie on: dp_shard, or (dp_replicate, dp_shard) for HSDP.

    Shards over one rank with replicas are HSDP, too, as in torchtitan: the axis is there with degree 1.
    """
    mesh = layout_mesh(layout)
    axes = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
    return mesh if mesh.mesh_dim_names == axes else mesh[axes]


def replica_mesh(layout: Layout) -> DeviceMesh:
    """The part that DDP's replicas lie on."""
    return layout_mesh(layout)["dp_replicate" if layout.dp_replicate > 1 else "dp_shard"]
