"""Collectives on the phantom GPU: what they do to values that are known. Shapes come from torch's own meta kernels.

With one rank's point of view, values that every rank has alike (sizes, indices) stay known: the others would send the
same.
"""

from __future__ import annotations

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
