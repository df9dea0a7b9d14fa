"""Workspaces of cuBLAS: one a handle, allocated at its first product and kept."""

from __future__ import annotations

import numpy as np

from metapeak.tracer.liveness import Category, Liveness, Phase

# Operators that CUDA runs through cuBLAS or cuBLASLt.
_CUBLAS_OPS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.addbmm.", "aten.mv.", "aten.addmv.")


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Bytes of one cuBLAS workspace.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: 4096 KiB x 8 on compute capability 9.0
    and 10.0, 10.3, 12.0; elsewhere :4096:2:16:8, that is 2 x 4 MiB + 8 x 16 KiB.

    >>> cublas_workspace_bytes((8, 0)), cublas_workspace_bytes((9, 0))
    (8519680, 33554432)
    """
    return 8 * 4096 * 1024 if compute_capability[0] in (9, 10, 12) else 2 * 4096 * 1024 + 8 * 16 * 1024


def with_cublas_workspaces(liveness: Liveness, compute_capability: tuple[int, int]) -> Liveness:
    """The liveness with a workspace for each cuBLAS handle, from its first matrix product on.

    Handles belong to threads: forward runs on the program's thread, backward (with what it recomputes) on autograd's,
    so training holds two. They are allocated through the caching allocator and kept.
    Source: as `cublas_workspace_bytes`; recorded allocator histories of training hold two of them, of inference one.
    """
    is_product = np.array([name.startswith(_CUBLAS_OPS) for name in liveness.op_names], dtype=bool)[liveness.op]
    births = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        products = np.flatnonzero(is_product & (liveness.op_phase == phase))
        if len(products):
            births.append(int(products[0]))
    nbytes = cublas_workspace_bytes(compute_capability)
    return liveness.with_storages(
        birth=births,
        death=[liveness.num_ops + 1] * len(births),
        nbytes=[nbytes] * len(births),
        category=Category.WORKSPACE,
        module=[0] * len(births),
        shapes=[(nbytes,)] * len(births),
        dtype="uint8",
    )
