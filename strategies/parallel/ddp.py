"""Distributed data parallelism of torch (DDP): replicas, gradients averaged in buckets.

What it changes: the reducer keeps a second copy of all gradients, in buckets, from the first backward on.
Where each byte comes from: torch's own DistributedDataParallel and its reducer run on the phantom GPU.
Not modelled: find_unused_parameters, static_graph.
Sources: torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metapeak.strategies.base import NoOpStrategy
from metapeak.strategies.parallel.layout import NO_LAYOUT, Layout
from metapeak.strategies.parallel.meshes import replica_mesh

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DDP(NoOpStrategy):
    """`bucket_cap_mb` None is torch's default: 25 MiB, the first bucket 1 MiB."""

    layout: Layout = NO_LAYOUT
    bucket_cap_mb: int | None = None
    gradient_as_bucket_view: bool = False

    name = "ddp"

    def distribute(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module wrapped in DistributedDataParallel."""
        from torch.nn.parallel import DistributedDataParallel

        with _replicas_are_alike(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # a newer name of broadcast_buffers
            wrapped = DistributedDataParallel(
                module,
                process_group=replica_mesh(self.layout).get_group(),
                bucket_cap_mb=self.bucket_cap_mb,
                gradient_as_bucket_view=self.gradient_as_bucket_view,
                broadcast_buffers=False,
            )
        wrapped.register_comm_hook(None, _reduced)
        return wrapped


def _reduced(state, bucket):  # torch looks at the annotations of a hook, if it has any
    """The all-reduce of a bucket, in place as NCCL does it; the process group without peers gives no result."""
    import torch

    torch.distributed.all_reduce(bucket.buffer())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@contextlib.contextmanager
def _replicas_are_alike() -> Iterator[None]:
    """There are no other replicas whose shapes could differ or that need this one's values."""
    from unittest import mock

    where = "torch.nn.parallel.distributed."
    with (
        mock.patch(where + "_verify_param_shape_across_processes", lambda *arguments, **options: None),
        mock.patch(where + "_sync_module_states", lambda *arguments, **options: None),
    ):
        yield
