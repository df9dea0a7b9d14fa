"""What an out-of-memory message of torch says, in every wording that it has had.

The size after "Tried to allocate" is not the tensor's: it is that of the segment which the caching allocator asked of
the driver (`format_size(alloc_size)`), after `round_size` and `get_allocation_size`: 2 MiB for requests up to 1 MiB,
20 MiB for those below 10 MiB, else the next multiple of 2 MiB. Sizes are printed with two decimals, so each is a range.
Messages of `cudaMallocAsync` and of the MPS backend name the request itself.

Cases (version -> wording):
* 0.4 to 1.4: "(GPU 0; 11.17 GiB total capacity; 10.62 GiB already allocated; 16.81 MiB free; 35.59 MiB cached)", where
  cached is what is reserved and not allocated; some 1.x builds add "; 1.2 MiB inactive".
* 1.5 to 2.0: "...; 10.85 GiB reserved in total by PyTorch)", with "20.00 GiB allowed; " under a memory fraction.
* 2.1 on: "GPU 0 has a total capacity of 23.69 GiB of which 2.94 GiB is free. ... Of the allocated memory 19.50 GiB is
  allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated." ("capacty" in 2.1), with other processes,
  this process, "allowed" and private pools where there are any.
* HIP, XPU, MUSA, NPU, MPS backends and cudaMallocAsync in their own words.
* "CUDA error: out of memory" and its like name no size: nothing can be looked up.

Sources: c10/cuda/CUDACachingAllocator.cpp (0.4 to 2.12), CUDAMallocAsyncAllocator.cpp, aten/src/ATen/mps/
MPSAllocator.mm, c10/xpu/XPUCachingAllocator.cpp; c10::CachingAllocator::format_size.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from metapeak.tracer.errors import InputError
from metapeak.tracer.gpus import GIB, MIB

_UNITS = {"bytes": 1, "byte": 1, "b": 1, "kib": 1 << 10, "kb": 1 << 10, "mib": MIB, "mb": MIB, "gib": GIB, "gb": GIB}
_SIZE = r"(\d+(?:\.\d+)?)\s*(bytes?|[KMG]i?B|B)\b"


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRange:
    """The bytes, least and most, that print as one size."""

    low: int
    high: int

    def __contains__(self, nbytes: int) -> bool:
        return self.low <= nbytes <= self.high

    @property
    def middle(self) -> int:
        return (self.low + self.high) // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class OomMessage:
    """The numbers of a message; None for those that it does not have.

    `requested` is the segment asked of the driver, or with `names_request` the request itself. `allocated` and
    `reserved` are of torch's allocator in this process, `free` and `total` the device's, `process` all of this process,
    `allowed` the limit of a memory fraction.
    """

    backend: str
    requested: SizeRange
    names_request: bool = False
    device: int | None = None
    total: SizeRange | None = None
    free: SizeRange | None = None
    allocated: SizeRange | None = None
    reserved: SizeRange | None = None
    process: SizeRange | None = None
    allowed: SizeRange | None = None

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes that torch's segments can have on this device beside everything else: what is reserved and free."""
        if self.reserved is None or self.free is None:
            return None
        room = self.reserved.middle + self.free.middle
        return min(room, self.allowed.middle) if self.allowed is not None else room


def read_oom_message(text: str) -> OomMessage:
    """The numbers of an out-of-memory message, wherever in a log it stands.

    Raises InputError for a text without one, and for a message that names no size.

    >>> message = read_oom_message("CUDA out of memory. Tried to allocate 774.00 MiB (GPU 0; 80.00 GiB total capacity; "
    ...     "71.96 GiB already allocated; 791.50 MiB free; 72.18 GiB reserved in total by PyTorch)")
    >>> 811597824 in message.requested, message.device, message.capacity_bytes >> 20
    (True, 0, 74703)
    """
    text = " ".join(re.sub(r"\[rank\d+\]:", " ", text).split())
    match = re.search(r"[Tt]ried to allocate\s+" + _SIZE, text) or re.search(r"\bRequested\s*:\s*" + _SIZE, text)
    if match is None:
        raise InputError(_no_size(text))
    asynchronous = match[0].lower().startswith("requested")
    backend = "cudaMallocAsync" if asynchronous else _backend(text)
    allocated, reserved = _held(text)
    device = re.search(r"\b(?:GPU|NPU|device|Device)\s*(\d+)\b", text)
    return OomMessage(
        backend=backend,
        requested=_range(match[1], match[2]),
        names_request=asynchronous or backend in ("MPS", "CPU"),
        device=int(device[1]) if device else None,
        total=_first(text, rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capacity", rf"Device limit\s*:\s*{_SIZE}"),
        free=_first(
            text, rf"of which {_SIZE} is free", rf"{_SIZE} free\b", rf"Free \(according to CUDA\)\s*:\s*{_SIZE}"
        ),
        allocated=allocated,
        reserved=reserved,
        process=_first(text, rf"this process has {_SIZE} memory in use"),
        allowed=_first(text, rf"{_SIZE} allowed\b", rf"max allowed: {_SIZE}"),
    )


def _no_size(text: str) -> str:
    shown = text if len(text) <= 100 else text[:97] + "..."
    if re.search(r"out of memory|OutOfMemory|can't allocate memory", text):
        return (
            f"The message '{shown}' names no size, so no tensor can be looked up (the driver failed outside torch's "
            "allocator, or the line with 'Tried to allocate' is missing). Give that line, or run `metapeak estimate`."
        )
    return f"'{shown}' is no out-of-memory message of torch: it has no 'Tried to allocate 7.83 GiB' in it."


def _backend(text: str) -> str:
    match = re.search(r"\b([A-Z]+)(?: backend)? out of memory", text)
    if match:
        return match[1]
    return "CPU" if "DefaultCPUAllocator" in text else "CUDA"


def _held(text: str) -> tuple[SizeRange | None, SizeRange | None]:
    """(allocated, reserved) of torch's allocator."""
    allocated = _first(
        text,
        rf"allocated memory {_SIZE} is allocated by PyTorch",
        rf"{_SIZE} already allocated",
        rf"Currently allocated\s*:\s*{_SIZE}",
        rf"MPS allocated: {_SIZE}",
    )
    reserved = _first(text, rf"{_SIZE} reserved in total")
    rest = _first(text, rf"{_SIZE} is reserved by PyTorch but unallocated", rf"{_SIZE} cached")
    if reserved is None and allocated is not None and rest is not None:
        reserved = SizeRange(low=allocated.low + rest.low, high=allocated.high + rest.high)
    return allocated, reserved


def _first(text: str, *patterns: str) -> SizeRange | None:
    for pattern in patterns:
        match = re.search(pattern, text)
        if match:
            return _range(match[1], match[2])
    return None


def _range(number: str, unit: str) -> SizeRange:
    """The sizes that print so: half a unit of the last digit to both sides; whole bytes are exact.

    A person may have shortened the number: `1.6 GiB` is a range of 0.1 GiB, as it is written.
    """
    scale = _UNITS[unit.lower()]
    value = float(number) * scale
    if scale == 1:
        return SizeRange(low=int(value), high=int(value))
    half = 0.5 * scale / 10 ** len(number.partition(".")[2])
    return SizeRange(low=max(0, int(value - half)), high=int(value + half) + 1)
