"""Multiprocessors of GPUs: how many blocks a kernel is split into depends on them.

Source: NVIDIA's datasheets and architecture whitepapers (enabled multiprocessors of the product, not of the full chip);
resident threads by compute capability from the CUDA programming guide, technical specifications.
"""

from __future__ import annotations

from metapeak.tracer.gpus import Gpu
from metapeak.tracer.kernels.registry import Device

_MULTIPROCESSORS = {
    "v100-16gb-sxm2": 80, "v100-32gb-sxm2": 80, "v100-32gb-pcie": 80, "t4": 40,
    "a10": 72, "a10g": 80, "a16": 10, "a30": 56, "a40": 84,
    "a100-40gb-sxm": 108, "a100-40gb-pcie": 108, "a100-80gb-sxm": 108, "a100-80gb-pcie": 108, "a800-80gb-sxm": 108,
    "h100-sxm": 132, "h100-pcie": 114, "h100-nvl": 132, "h800-sxm": 132, "h20": 78,
    "h200-sxm": 132, "h200-nvl": 132, "gh200-96gb": 132, "gh200-144gb": 132,
    "b100": 148, "b200-sxm": 148, "gb200": 148, "b300-sxm": 148, "gb300": 152, "gb10": 48,
    "rtx-3060-12gb": 28, "rtx-3070": 46, "rtx-3080-10gb": 68, "rtx-3080ti": 80, "rtx-3090": 82, "rtx-3090ti": 84,
    "rtx-4060": 24, "rtx-4060ti-16gb": 34, "rtx-4070": 46, "rtx-4070ti-super": 66, "rtx-4080": 76, "rtx-4090": 128,
    "rtx-5060ti-16gb": 36, "rtx-5070": 48, "rtx-5070ti": 70, "rtx-5080": 84, "rtx-5090": 170,
    "rtx-a4000": 48, "rtx-a4500": 56, "rtx-a5000": 64, "rtx-a6000": 84, "rtx-4000-ada": 48, "rtx-6000-ada": 142,
    "l4": 58, "l40": 142, "l40s": 142,
    "rtx-pro-4500-blackwell": 82, "rtx-pro-6000-ws": 188, "rtx-pro-6000-server": 188,
}  # fmt: skip


def device_of(gpu: Gpu | None) -> Device:
    """What kernels see of a GPU. Without one, or of another vendor or an unlisted card: an A100.

    >>> device_of(None)
    Device(compute_capability=(8, 0), multiprocessors=108, threads_per_multiprocessor=2048)
    """
    if gpu is None or gpu.compute_capability is None:
        return Device()
    return Device(
        compute_capability=gpu.compute_capability,
        multiprocessors=gpu.multiprocessors or _MULTIPROCESSORS.get(gpu.id, Device().multiprocessors),
        threads_per_multiprocessor=_threads(gpu.compute_capability),
    )


def knows(gpu: Gpu) -> bool:
    """Whether the number of the GPU's multiprocessors is known."""
    return gpu.multiprocessors is not None or gpu.id in _MULTIPROCESSORS


def _threads(capability: tuple[int, int]) -> int:
    if capability == (7, 5):
        return 1024
    return 1536 if capability in ((8, 6), (8, 7), (8, 9)) or capability >= (12, 0) else 2048
