"""Which optimizers work on DTensors, the shards that FSDP2 and tensor parallelism make of parameters."""

from __future__ import annotations

from metapeak.strategies.optimizers.registry import find
from metapeak.tracer.errors import InputError
from metapeak.tracer.spec import OptimizerSpec

# Why the classes of a library cannot: found by running them on DTensors of torch 2.13. None stands for all classes.
_WHY_NOT = {
    ("bitsandbytes", None): "bitsandbytes' kernels take plain tensors",
    ("adafactor", None): "transformers' Adafactor adds to plain tensors, its row and column statistics",
    ("torch_optim", "Adafactor"): "torch's Adafactor takes powers of norms in place, for which DTensor has no rule",
    ("torchao", None): "torchao's compiled step is not run here but stood for by one that takes plain tensors",
}


def check_on_shards(spec: OptimizerSpec, sharded_by: str) -> None:
    """Raise InputError for an optimizer that a real run could not step on DTensors either."""
    entry, _ = find(spec)
    why = _WHY_NOT.get((entry.library, None)) or _WHY_NOT.get((entry.library, entry.class_name))
    if spec.master_weights:
        why = "they are float32 copies of whole parameters; FSDP2's mixed precision has float32 shards of its own"
    if why is not None:
        name = "master weights" if spec.master_weights else f"optimizer {spec.name}"
        raise InputError(
            f"{name} cannot step the shards that {sharded_by} makes of parameters (DTensors): {why}. "
            "FSDP1's are plain tensors (--engine fsdp1)."
        )
