# ruff: noqa: E501 (messages as they are printed)
"""Messages in the words of every version: what torch's allocators print, as their sources and users have it."""

import pytest

from metapeak.tracer.device.oom_message import read_oom_message
from metapeak.tracer.errors import InputError

MIB, GIB = 1 << 20, 1 << 30

# (message, {field: bytes that it stands for}); each number is the value before it was printed with two decimals.
MESSAGES = {
    "0.4 to 1.4": (
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 2; 11.17 GiB total capacity; 10.62 GiB "
        "already allocated; 16.81 MiB free; 35.59 MiB cached)",
        dict(requested=20 * MIB, total=11.17 * GIB, allocated=10.62 * GIB, free=16.81 * MIB)
        | dict(reserved=10.62 * GIB + 35.59 * MIB, device=2, backend="CUDA"),
    ),
    "1.x with inactive": (
        "CUDA out of memory. Tried to allocate 512.00 KiB (GPU 0; 7.93 GiB total capacity; 6.00 GiB already allocated; "
        "1.00 MiB free; 3.00 MiB cached; 1.20 MiB inactive)",
        dict(requested=512 << 10, free=MIB, reserved=6 * GIB + 3 * MIB),
    ),
    "1.5 to 2.0": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 774.00 MiB (GPU 0; 80.00 GiB total capacity; "
        "71.96 GiB already allocated; 791.50 MiB free; 72.18 GiB reserved in total by PyTorch) If reserved memory is >> "
        "allocated memory try setting max_split_size_mb to avoid fragmentation.",
        dict(requested=774 * MIB, total=80 * GIB, allocated=71.96 * GIB, free=791.5 * MIB, reserved=72.18 * GIB),
    ),
    "a memory fraction": (
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.69 GiB total capacity; 9.00 GiB already allocated; "
        "13.00 GiB free; 10.00 GiB allowed; 9.50 GiB reserved in total by PyTorch)",
        dict(requested=2 * GIB, allowed=10 * GIB, free=13 * GIB, reserved=9.5 * GIB, capacity_bytes=10 * GIB),
    ),
    "2.1": (
        "CUDA out of memory. Tried to allocate 208.00 MiB. GPU 1 has a total capacty of 39.41 GiB of which 183.50 MiB "
        "is free. Including non-PyTorch memory, this process has 39.23 GiB memory in use. Of the allocated memory 37.98 "
        "GiB is allocated by PyTorch, and 0.89 GiB is reserved by PyTorch but unallocated.",
        dict(requested=208 * MIB, total=39.41 * GIB, free=183.5 * MIB, process=39.23 * GIB, device=1)
        | dict(allocated=37.98 * GIB, reserved=38.87 * GIB),
    ),
    "2.2 on, other processes": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 42.00 MiB. GPU 0 has a total capacity of 47.27 "
        "GiB of which 9.38 MiB is free. Process 644963 has 5.59 MiB memory in use. Process 3053273 has 29.04 GiB memory "
        "in use. Including non-PyTorch memory, this process has 3.14 GiB memory in use. Of the allocated memory 2.92 "
        "GiB is allocated by PyTorch, and 34.62 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
        "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
        dict(requested=42 * MIB, total=47.27 * GIB, free=9.38 * MIB, process=3.14 * GIB, allocated=2.92 * GIB),
    ),
    "private pools, wrapped lines, rank prefixes": (
        "[rank15]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.63 GiB.\n[rank15]: GPU 7 has a total "
        "capacity of 79.11 GiB of which 2.61 GiB is free. Of the allocated memory 48.15 GiB is allocated\nby PyTorch, "
        "with 50.00 MiB allocated in private pools (e.g., CUDA Graphs), and 3.49 GiB is reserved by PyTorch but "
        "unallocated.",
        dict(requested=2.63 * GIB, free=2.61 * GIB, allocated=48.15 * GIB, reserved=51.64 * GIB, device=7),
    ),
    "without a device index": (
        "CUDA out of memory. Tried to allocate 224.00 MiB. GPU  has a total capacity of 44.34 GiB of which 160.81 MiB "
        "is free. Process 47694 has 44.17 GiB memory in use.",
        dict(requested=224 * MIB, total=44.34 * GIB, device=None, allocated=None, capacity_bytes=None),
    ),
    "ROCm": (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 191.98 "
        "GiB of which 1.20 GiB is free.",
        dict(backend="HIP", requested=4 * GIB, total=191.98 * GIB),
    ),
    "Intel": (
        "XPU out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 15.91 GiB. Of the allocated "
        "memory 15.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.",
        dict(backend="XPU", requested=2 * MIB, allocated=15 * GIB, free=None),
    ),
    "cudaMallocAsync": (
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 22.43 GiB\nRequested               : 4.07 GiB\n"
        "Device limit            : 16.00 GiB\nFree (according to CUDA): 0 bytes\n",
        dict(backend="cudaMallocAsync", names_request=True, requested=4.07 * GIB, total=16 * GIB, free=0, device=0),
    ),
    "Apple": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 17.98 GB, other allocations: 384.00 KB, max allowed: "
        "18.13 GB). Tried to allocate 256.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0",
        dict(backend="MPS", names_request=True, requested=256 * MIB, allocated=17.98 * GIB, allowed=18.13 * GIB),
    ),
    "the CPU": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:83] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 268435456 bytes. Error code 12 (Cannot allocate memory)",
        dict(backend="CPU", names_request=True, requested=268435456),
    ),
}


@pytest.mark.parametrize("wording", MESSAGES)
def test_every_number_is_read(wording):
    text, expected = MESSAGES[wording]
    message = read_oom_message(f"Traceback (most recent call last):\n  File x\n{text}\nsomething after")
    for name, value in expected.items():
        found = getattr(message, name)
        if isinstance(value, (str, bool)) or value is None or name == "device":
            assert found == value, name
        elif name == "capacity_bytes":
            assert found == pytest.approx(value, abs=GIB * 0.01), name
        else:
            # The true value lies in the range, and the range is no wider than what two decimals leave open.
            assert int(value) in found, name
            assert found.high - found.low <= 2 * (0.01 * GIB + 1), name


def test_a_size_without_decimals_is_a_wider_range():
    assert read_oom_message("Tried to allocate 8 GiB").requested.low == 7.5 * GIB
    assert 8.4 * GIB in read_oom_message("CUDA out of memory. Tried to allocate 8.4 GiB").requested


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RuntimeError: CUDA error: out of memory", "names no size"),
        ("cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:66", "names no size"),
        ("NaN or Inf found in input tensor", "is no out-of-memory message"),
        ("", "is no out-of-memory message"),
    ],
)
def test_what_names_no_size_is_refused(text, words):
    with pytest.raises(InputError, match=words):
        read_oom_message(text)
