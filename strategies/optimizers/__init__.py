"""Optimizers: what `optimizer.step()` allocates and what it keeps.

What they change: the optimizer of the traced step. Where each byte comes from: torch.optim and transformers' classes
run for real on the phantom GPU; classes of packages that estimates do not need (bitsandbytes, torchao, lion-pytorch)
are written here with the same allocations, and tested equal to the real ones. Each file says its own.
Not modelled: classes that project gradients by their values (GaLore, APOLLO), LOMO. Sources: in each file.

registry.py knows the names and imports no torch; maker.py goes from an OptimizerSpec to a function that makes the
optimizer; the other files make the classes and import torch, so they are imported when the optimizer is made.
"""

from metapeak.strategies.optimizers.maker import OptimizerMaker, check_optimizer, optimizer_maker
from metapeak.strategies.optimizers.registry import (
    ALIASES,
    IMPLEMENTATIONS,
    OPTIMIZERS,
    STATE_DTYPES,
    parse_arguments,
)

__all__ = [
    "ALIASES",
    "IMPLEMENTATIONS",
    "OPTIMIZERS",
    "STATE_DTYPES",
    "OptimizerMaker",
    "check_optimizer",
    "optimizer_maker",
    "parse_arguments",
]
