"""What a process takes of a GPU beside the allocator's segments: CUDA context, libraries, communicators.

None of it can be computed: it depends on driver, kernels loaded and topology. So every item is a range with where it is
from, and the verdict uses both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metapeak.tracer.gpus import MIB, Gpu

# One NCCL connection within a node, a channel: the receiver's buffers (struct, LL 512 KiB, LL128 4,800 KiB, SIMPLE
# 4 MiB, rounded up to 2 MiB) and the sender's 2 MiB. Source: NVIDIA/nccl src/transport/p2p.cc, src/init.cc; reported
# allocations of 10,485,760 and 2,097,152 bytes (issue 1685).
NCCL_CHANNEL_BYTES = 10 * MIB + 2 * MIB
_NCCL_CHANNELS = (2, 32)  # fewest over PCIe, most seen over NVLink; the limit is 64
# Most that was reported for one communicator (all-reduce: rings and trees), NVIDIA/nccl issue 864.
_NCCL_REPORTED_BYTES = 1_600_000_000
_NVLS_CHANNELS = {9: 16, 10: 32}  # by major compute capability; src/transport/nvls.cc
_NVLS_CHANNEL_BYTES = 2 * 8 * 128 * 1024  # a head of a channel


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """One thing that takes device memory: bytes between `low` and `high`; `tag` is assumed or derived.

    `typical_bytes` is what most of the sources show, where that is not the middle of the range.
    """

    name: str
    low_bytes: int
    high_bytes: int
    tag: str
    source: str
    typical_bytes: int | None = None

    @property
    def expected_bytes(self) -> int:
        """The typical bytes, else the middle of the range."""
        return (self.low_bytes + self.high_bytes) // 2 if self.typical_bytes is None else self.typical_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """Everything beside the allocator's segments, of one process; `groups` are its communicators' sizes."""

    items: tuple[Overhead, ...] = ()
    groups: tuple[int, ...] = ()

    @property
    def low_bytes(self) -> int:
        return sum(item.low_bytes for item in self.items)

    @property
    def high_bytes(self) -> int:
        return sum(item.high_bytes for item in self.items)

    @property
    def expected_bytes(self) -> int:
        """What the items are expected to take: a number to print, no measurement."""
        return sum(item.expected_bytes for item in self.items)


def overheads(gpu: Gpu | None, groups: Sequence[int] = (), *, lazy_loading: bool = True) -> Overheads:
    """Context, libraries and communicators of one process on `gpu` (None: any NVIDIA GPU).

    `groups` are the sizes of the process groups that the rank communicates in; a group of one has no communicator.
    `lazy_loading` is CUDA_MODULE_LOADING's default since CUDA 12.2; without it all kernels are loaded at start.

    >>> [(item.name, item.low_bytes // MIB, item.high_bytes // MIB) for item in overheads(None).items]
    [('cuda_context', 250, 450), ('libraries', 0, 250)]
    """
    items = [_context(gpu, lazy_loading), _LIBRARIES]
    real = [size for size in groups if size > 1]
    if real:
        items.append(_communicators(gpu, real))
    return Overheads(items=tuple(items), groups=tuple(real))


def device_bytes(reserved: tuple[int, int] | int, extra: Overheads) -> tuple[int, int]:
    """(least, most) bytes that the driver shows for a process with these reserved bytes (one number, or a range)."""
    low, high = (reserved, reserved) if isinstance(reserved, int) else reserved
    return low + extra.low_bytes, high + extra.high_bytes


_LIBRARIES = Overhead(
    name="libraries",
    low_bytes=0,
    high_bytes=250 * MIB,
    tag="assumed",
    source="cuBLAS and cuDNN handles and kernels loaded in use: up to what an A100-80GB had lost at an out-of-memory "
    "(657 MiB) beyond a bare context",
)


def _context(gpu: Gpu | None, lazy_loading: bool) -> Overhead:
    if gpu is not None and gpu.vendor not in ("", "NVIDIA"):
        return Overhead(
            name="cuda_context",
            low_bytes=250 * MIB,
            high_bytes=1000 * MIB,
            tag="assumed",
            source=f"the runtime of {gpu.vendor}: no measurement known, a wide range",
        )
    if not lazy_loading:
        return Overhead(
            name="cuda_context",
            low_bytes=860 * MIB,
            high_bytes=1650 * MIB,
            tag="assumed",
            source="all kernels loaded at start: RTX 2080 Ti about 0.86 GiB, RTX 3090 1.45 GiB, others above 1000 MB "
            "(pytorch issues 49877, 107667, 109888)",
        )
    return Overhead(
        name="cuda_context",
        low_bytes=250 * MIB,
        high_bytes=450 * MIB,
        tag="assumed",
        source="kernels loaded lazily: RTX 3090 256 MiB, RTX 6000 Ada 426 MiB, others 300 to 400 MB (pytorch issues "
        "107667, 109888); H100, H200, B200: no measurement known",
    )


def _communicators(gpu: Gpu | None, groups: Sequence[int]) -> Overhead:
    fewest, most = _NCCL_CHANNELS
    low = high = 0
    for size in groups:
        low += fewest * NCCL_CHANNEL_BYTES
        high += min(_NCCL_REPORTED_BYTES, most * NCCL_CHANNEL_BYTES * 2 * min(size - 1, 2)) + _nvls_bytes(gpu, size)
    return Overhead(
        name="communicators",
        low_bytes=low,
        high_bytes=high,
        tag="assumed",
        source=f"NCCL, groups of {', '.join(map(str, groups))}: {fewest} channels of a ring, up to {most} of rings and "
        "trees and NVLink SHARP's buffers (nccl src/transport/p2p.cc, nvls.cc; issues 864, 1685)"
        + ("; RCCL taken as NCCL" if gpu is not None and gpu.vendor == "AMD" else ""),
    )


def _nvls_bytes(gpu: Gpu | None, size: int) -> int:
    """Buffers of NVLink SHARP: channels x 2 MiB x ranks of a node, for more than two ranks on Hopper and Blackwell."""
    capability = gpu.compute_capability if gpu is not None else None
    channels = _NVLS_CHANNELS.get(capability[0], 0) if capability else 0
    return channels * _NVLS_CHANNEL_BYTES * min(size, 8) if size > 2 else 0
