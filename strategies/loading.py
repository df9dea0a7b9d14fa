"""Loading: how a model comes onto its device, and the most that this takes there and on the host.

What it changes: nothing; it is arithmetic on the storages of the prepared module.
Where each byte comes from: `device` (from_pretrained with a device_map): tensor by tensor from the memory-mapped
checkpoint, each converted to the weights' dtype on the host before it is copied; no two copies on the device. Weights
that bitsandbytes packs while loading come one at a time in full (transformers loads without threads then), and the full
weight lies beside its packed one and the float32 statistics until it is replaced. `cpu` (the default of
from_pretrained): everything on the host in the weights' dtype first, then `module.to` tensor by tensor.
Not modelled: weights that transformers merges or splits while loading (experts of some checkpoints); the page cache of
a mapped checkpoint, which the system takes back.
Sources: transformers 5.24 core_model_loading.py (convert_and_load_state_dict_in_model, _materialize_copy,
GLOBAL_WORKERS), aten/src/ATen/native/cuda/Copy.cu (copies between devices convert on the source), bitsandbytes 0.50
nn/modules.py (Params4bit._quantize, Int8Params._quantize), functional.py (quantize_4bit).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WAYS = ("device", "cpu")
# Threads that copy tensors at once. Source: core_model_loading.py, GLOBAL_WORKERS.
WORKERS = 4
_BLOCK_SIZE, _FLOAT32, _FLOAT16 = 64, 4, 2
# Schemes that are packed while loading, not in the checkpoint.
_PACKED_HERE = ("Linear4bit", "Linear8bitLt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """`device_peak_bytes` of parameters and buffers while they come, `host_bytes` beside them, and how."""

    device_peak_bytes: int
    host_bytes: int
    rule: str


def loading_of(module: torch.nn.Module, way: str) -> Loading:
    """What loading the prepared module takes on one device that holds it whole."""
    there, peak, sizes = 0, 0, []
    for kept, full, beside in _arrivals(module):
        peak = max(peak, there + kept + beside)
        there += kept
        sizes.append(full)
    packs = any(type(part).__name__ in _PACKED_HERE for part in module.modules())
    if way == "cpu":
        return Loading(
            device_peak_bytes=peak if packs else there,
            host_bytes=sum(sizes),
            rule="the whole model on the host in its dtype, then moved tensor by tensor",
        )
    at_once = 1 if packs else WORKERS
    return Loading(
        device_peak_bytes=peak,
        host_bytes=sum(sorted(sizes)[-at_once:]),
        rule=f"straight to the device, {at_once} tensor{'s' * (at_once > 1)} at a time from the mapped checkpoint",
    )


def _arrivals(module: torch.nn.Module) -> Iterator[tuple[int, int, int]]:
    """(bytes kept, bytes in the weights' dtype, bytes beside those kept while it comes) of every weight, in order."""
    seen: set[int] = set()
    dtype = getattr(module, "dtype", None) or next(module.parameters()).dtype
    for part in module.modules():
        packed = part.storages() if hasattr(part, "weight_storage") else []
        if packed:
            kept = sum(tensor.untyped_storage().nbytes() for tensor in packed)
            seen |= {tensor.untyped_storage()._cdata for tensor in packed}
            yield kept, *_while_packing(part, kept, dtype)
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is None or tensor.untyped_storage()._cdata in seen:
                continue
            seen.add(tensor.untyped_storage()._cdata)
            nbytes = tensor.untyped_storage().nbytes()
            yield nbytes, nbytes, 0


def _while_packing(part, kept: int, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes of the full weight, bytes beside the packed one while it is made)."""
    kind, numel = type(part).__name__, part.weight_numel
    if kind == "Linear4bit":
        full = numel * part.quant_dtype.itemsize
        # Double quantisation: absmax and absmax - offset in float32, until they are packed themselves.
        statistics = 2 * -(-numel // _BLOCK_SIZE) * _FLOAT32 if part.compress_statistics else 0
        return full, full + statistics
    if kind == "Linear8bitLt":  # the weight as it came, and a float16 copy of it where it is of another dtype
        full = numel * dtype.itemsize
        return full, full + (0 if str(dtype) == "torch.float16" else numel * _FLOAT16)
    return kept, 0
