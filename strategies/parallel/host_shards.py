"""Shards on the host: `fully_shard` with CPUOffloadPolicy.

What it changes: parameters, gradients and optimizer states of a rank live in host memory and the optimizer runs there;
of a unit's shards a copy goes to the device before each all-gather, of its reduced gradients one comes back.
Where each byte comes from: the code paths of torch that a shard on the host takes, on the phantom GPU. The shards
themselves stay phantom tensors, because the phantom host has no memory either: copies to the device are made as
copies, and what lives on the host is taken out of the device's timeline afterwards.
Sources: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (all_gather_inputs), _fsdp_collectives.py
(_get_param_all_gather_inputs, foreach_reduce).
Not modelled: what the optimizer's kernels on the host take there for a moment.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from metapeak.tracer.graph import LOAD
from metapeak.tracer.liveness import Category, Liveness, Phase

if TYPE_CHECKING:
    import torch

    from metapeak.tracer.graph import StepGraph


def keep_on_host(module: torch.nn.Module) -> None:
    """Let every parameter that `fully_shard` sharded take the ways of one whose shard is on the host, in place."""
    for part in module.modules():
        state = getattr(part, "_get_fsdp_state", lambda: None)()
        for group in getattr(state, "_fsdp_param_groups", None) or ():
            for parameter in group.fsdp_params:
                parameter.offload_to_cpu, parameter.pin_memory = True, False
                data = parameter._sharded_param_data
                data.to = functools.partial(_copy_to_device, data)
                parameter.to_sharded_dtensor = functools.partial(_from_host, parameter.to_sharded_dtensor)


def _copy_to_device(shard: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return shard.clone()


def _from_host(to_sharded_dtensor, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient that came to the host, as the phantom tensor that its shard is, too."""
    from metapeak.tracer.phantom import HostCopy

    return to_sharded_dtensor(gradient.back() if type(gradient) is HostCopy else gradient)


def on_host(graph: StepGraph) -> np.ndarray:
    """Which storages are the host's: shards of parameters, and what the optimizer makes or is the first to touch."""
    birth = np.asarray(graph.birth)
    phase = np.asarray(graph.phase)[birth]
    loaded = (phase == Phase.LOAD) & (np.asarray(graph.category) == Category.PARAMETER)
    loaded[list(graph.whole)] = False
    return loaded | (phase == Phase.OPTIMIZER)


def without_host(liveness: Liveness, graph: StepGraph) -> Liveness:
    """The device's timeline: storages of the host take no bytes of it."""
    nbytes = liveness.nbytes.copy()
    nbytes[: len(graph.birth)][on_host(graph)] = 0
    return replace(liveness, nbytes=nbytes)


def host_bytes(graph: StepGraph) -> dict[str, int]:
    """Bytes of this rank's shards on the host, by what they are: parameters, gradients, optimizer states."""
    host, nbytes, category = on_host(graph), np.asarray(graph.nbytes), np.asarray(graph.category)
    op = np.asarray([graph.op_names[index] for index in graph.op])[np.asarray(graph.birth)]
    phase, iteration = (np.asarray(column)[np.asarray(graph.birth)] for column in (graph.phase, graph.iteration))
    gradients = host & (op == LOAD) & (phase == Phase.OPTIMIZER) & (iteration == 1)
    return {
        "parameters": int(nbytes[host & (category == Category.PARAMETER)].sum()),
        "gradients": int(nbytes[gradients].sum()),
        "optimizer states": int(nbytes[host & (category == Category.OPTIMIZER_STATE)].sum()),
    }
