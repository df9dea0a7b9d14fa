"""Collectives on the phantom GPU: what they do to values that are known. Shapes come from torch's own meta kernels.

With one rank's point of view, values that every rank has alike (sizes, indices) stay known: the others would send the
same.

Note [What peers send]
    An all-to-all of counts says how much every peer is about to send. Each peer has a batch of its own that is routed
    as the traced rank's is, so it sends what the traced rank keeps for itself, times the load skew: the chunk that is
    for this rank comes back once for every rank. With a skew of 1.5 the traced rank gets half as much again as the
    mean, and what it sends stays as it is: other ranks have that much less, in sum.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.distributed._functional_collectives  # registers the operators

from metapeak.tracer.dispatch import handles
from metapeak.tracer.errors import DataDependentError
from metapeak.tracer.phantom import PhantomTensor, small_enough_to_know

_aten = torch.ops.aten


@handles(torch.ops.c10d.broadcast_.default)
def broadcast(mode, func, args, kwargs):
    """DDP broadcasts the order of its buckets and reads it back."""
    _, work = func([torch.zeros(1)], *args[1:], **kwargs)
    return args[0], work


_load_skew = 1.0

ALIKE_PEERS = "every rank's batch is routed alike: a rank receives from each peer what it keeps for itself{times}"


@contextlib.contextmanager
def load_skew(skew: float) -> Iterator[None]:
    """Inside, peers send the traced rank `skew` times as many rows as a balanced routing gives it."""
    global _load_skew
    before, _load_skew = _load_skew, skew
    try:
        yield
    finally:
        _load_skew = before


@handles(torch.ops.c10d.alltoall_base_.default)
def all_to_all(mode, func, args, kwargs):
    """Counts exchanged between ranks, see Note [What peers send]. Other tensors have shapes only."""
    received, sent, group = args[:3]
    values = mode.values(sent)
    equal_chunks = not args[3] and not args[4]
    if values is None or sent.dtype.is_floating_point or not equal_chunks or not small_enough_to_know(received):
        return NotImplemented
    mode.assume(ALIKE_PEERS.format(times="" if _load_skew == 1 else f", times the load skew {_load_skew:g}"))
    members = torch.distributed.ProcessGroup.unbox(group)
    peers = members.size()
    kept = values.view(peers, -1)[members.rank()]
    if _load_skew != 1:
        kept = torch.tensor([math.ceil(count * _load_skew) for count in kept.tolist()], dtype=kept.dtype)
    received.known = kept.repeat(peers).view(received.shape)
    return func(torch.zeros(peers), torch.zeros(peers), *args[2:], **kwargs)


@handles(torch.ops._c10d_functional._wrap_tensor_autograd.default)
def wrap(mode, func, args, kwargs):
    """The result of a functional collective, wrapped to be waited for when it is used: no memory of its own.

    Its meta kernel would make a copy.
    """
    return args[0]


@handles(_aten.copy_.default)
def copy(mode, func, args, kwargs):
    """Between host and device: DDP sends the order of its buckets to the device and reads what came of it."""
    destination, source = args[:2]
    if type(destination) is not PhantomTensor:
        return _copy_to_host(mode, func, destination, source)
    if type(source) is PhantomTensor or source.device.type != "cpu" or not _is_whole_integers(destination):
        return NotImplemented
    destination.known = source.detach().to(destination.dtype).expand(destination.shape).clone()
    return destination


def _copy_to_host(mode, func, destination, source):
    values = mode.values(source)
    if values is None:
        mode.refuse(
            DataDependentError, func, f"the program copies values of shape {tuple(source.shape)} into the host's memory"
        )
    return destination.copy_(values)


def _is_whole_integers(tensor: PhantomTensor) -> bool:
    """Whether a tensor of integers is all of its storage and nobody knows its values: what it holds is what comes."""
    if tensor.known is not None or tensor.dtype.is_floating_point or not small_enough_to_know(tensor):
        return False
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
