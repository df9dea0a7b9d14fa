"""The catalogue of GPUs: names that people use, and what torch can really use on each card.

Source: catalogue/gpus.json, whose entries name theirs. Usable memory is what `torch.cuda.mem_get_info()` printed where
that was seen, else the driver's total less what torch misses of it on similar cards.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from metapeak.tracer.errors import InputError, UnknownName

GIB = 1 << 30
MIB = 1 << 20

# When no torch total was seen, the driver's total less this: 0.45 GiB on NVIDIA cards up to 80 GB, 0.9 GiB on larger
# ones (the upper end seen there). Source: differences of memory_driver_total_mib and torch_total_gib_observed.
_DRIVER_MINUS_TORCH_BYTES = {"small": round(0.45 * GIB), "large": round(0.9 * GIB)}

# Spellings that people use beside ids and names; several cards of one name mean the most common one.
_SPELLINGS = {
    "h100": "h100-sxm",
    "h100-80gb": "h100-sxm",
    "h100-sxm5": "h100-sxm",
    "h100-80gb-sxm": "h100-sxm",
    "h100-80gb-hbm3": "h100-sxm",
    "h200": "h200-sxm",
    "h800": "h800-sxm",
    "b200": "b200-sxm",
    "b300": "b300-sxm",
    "a100": "a100-80gb-sxm",
    "a100-80gb": "a100-80gb-sxm",
    "a100-80": "a100-80gb-sxm",
    "a100-40gb": "a100-40gb-sxm",
    "a100-40": "a100-40gb-sxm",
    "a800": "a800-80gb-sxm",
    "v100": "v100-32gb-sxm2",
    "v100-16gb": "v100-16gb-sxm2",
    "v100-32gb": "v100-32gb-sxm2",
    "gh200": "gh200-96gb",
    "a6000": "rtx-a6000",
    "a5000": "rtx-a5000",
    "a4500": "rtx-a4500",
    "a4000": "rtx-a4000",
    "rtx-6000": "rtx-6000-ada",
    "rtx-pro-6000": "rtx-pro-6000-ws",
    "mi250x": "mi250x-gcd",
    "mi250": "mi250x-gcd",
    "rtx-3060": "rtx-3060-12gb",
    "rtx-3080": "rtx-3080-10gb",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator. `usable_bytes` is what torch can use of it, `usable_from` says where that number is from.

    `bandwidth_bytes` a second of its memory, `dense_flops` a second by dtype (fp16, bf16, fp8), as data sheets have
    it; `has_fast_link` is False for cards that reach each other over PCIe only. `link_bytes` a second go from one card
    to its neighbours in a machine, one way (None: not known).
    """

    id: str
    name: str
    vendor: str
    architecture: str
    compute_capability: tuple[int, int] | None
    marketed_gb: float
    driver_total_bytes: int | None
    usable_bytes: int
    usable_from: str
    supports_bf16: bool
    multiprocessors: int | None = None
    supports_fp8: bool = False
    bandwidth_bytes: int | None = None
    has_fast_link: bool = True
    link_bytes: float | None = None
    dense_flops: Mapping[str, float] = field(default_factory=dict)


@functools.cache
def all_gpus() -> tuple[Gpu, ...]:
    """Every accelerator of the catalogue, in its order."""
    text = resources.files("metapeak.tracer.catalogue").joinpath("gpus.json").read_text(encoding="utf-8")
    return tuple(_gpu(entry) for entry in json.loads(text)["accelerators"])


def find_gpu(name: str) -> Gpu:
    """The GPU that people mean by `name`: an id, a product name or a usual spelling.

    Raises UnknownName with the nearest ids.

    >>> find_gpu("RTX 4090").id, find_gpu("H100 SXM").id, find_gpu("a100-80gb").id
    ('rtx-4090', 'h100-sxm', 'a100-80gb-sxm')
    """
    by_spelling = _by_spelling()
    key = _normalise(name)
    if key in by_spelling:
        return by_spelling[key]
    raise UnknownName("GPU", name, [gpu.id for gpu in all_gpus()], "All: metapeak gpus; or give --gpu-memory 24GiB.")


def gpu_of_memory(text: str) -> Gpu:
    """A nameless GPU of the given usable memory: `24GiB`, `80GB`, `24564MiB` or bytes.

    Raises InputError for anything else.

    >>> gpu_of_memory("24GiB").usable_bytes
    25769803776
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(gib|gb|mib|mb|b|)\s*", text.lower())
    if match is None or float(match[1]) <= 0:
        raise InputError(f"GPU memory '{text}' is no size. Give it as 24GiB, 80GB or 24564MiB.")
    unit = {"gib": GIB, "gb": 10**9, "mib": MIB, "mb": 10**6, "b": 1, "": 1}[match[2]]
    usable = int(float(match[1]) * unit)
    return Gpu(
        id=text.strip(),
        name=f"a GPU with {text.strip()}",
        vendor="",
        architecture="",
        compute_capability=None,
        marketed_gb=usable / 10**9,
        driver_total_bytes=None,
        usable_bytes=usable,
        usable_from="as given",
        supports_bf16=True,
        supports_fp8=True,
    )


def _gpu(entry: dict) -> Gpu:
    driver = entry["memory_driver_total_mib"]
    observed = entry["torch_total_gib_observed"]
    if observed:
        usable, origin = int(min(observed) * GIB), "torch's total as observed"
    elif driver:
        size = "small" if entry["memory_marketed_gb"] <= 80 else "large"
        usable, origin = driver * MIB - _DRIVER_MINUS_TORCH_BYTES[size], "driver's total less what torch misses"
    else:
        usable, origin = int(entry["memory_marketed_gb"] * 10**9), "marketed size, unverified"
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(entry["compute_capability"] or ""))
    return Gpu(
        id=entry["id"],
        name=entry["name"],
        vendor=entry["vendor"],
        architecture=entry["architecture"],
        compute_capability=(int(capability[1]), int(capability[2])) if capability else None,
        marketed_gb=entry["memory_marketed_gb"],
        driver_total_bytes=driver * MIB if driver else None,
        usable_bytes=usable,
        usable_from=origin,
        supports_bf16=bool(entry["supports"]["bf16"]),
        supports_fp8=bool(entry["supports"]["fp8"]),
        bandwidth_bytes=round(entry["memory_bandwidth_gb_s"] * 10**9) if entry["memory_bandwidth_gb_s"] else None,
        has_fast_link=bool(entry["link_gb_s_per_gpu_bidirectional"]),
        link_bytes=_link_bytes(entry),
        dense_flops={
            name: entry["dense_tflops"][name] * 1e12
            for name in ("fp16", "bf16", "fp8")
            if entry["dense_tflops"].get(name)
        },
    )


# Bytes a second of one direction of PCIe x16 by generation: PCI-SIG's rate a lane times 16 after encoding.
_PCIE_X16_BYTES = {"3.0": 15.75e9, "4.0": 31.5e9, "5.0": 63.0e9, "6.0": 121.0e9}


def _link_bytes(entry: Mapping[str, Any]) -> float | None:
    """The faster of the card's own link, half of what its data sheet gives for both ways, and its PCIe x16."""
    if entry["link_gb_s_per_gpu_bidirectional"]:
        return entry["link_gb_s_per_gpu_bidirectional"] / 2 * 1e9
    return _PCIE_X16_BYTES.get((entry.get("pcie") or "").removesuffix(" x16"))


@functools.cache
def _by_spelling() -> dict[str, Gpu]:
    by_id = {gpu.id: gpu for gpu in all_gpus()}
    spellings = {_normalise(spelling): by_id[target] for spelling, target in _SPELLINGS.items()}
    for gpu in all_gpus():
        for spelling in (gpu.id, gpu.name, gpu.id.removeprefix("rtx-")):
            spellings.setdefault(_normalise(spelling), gpu)
    return spellings


def _normalise(name: str) -> str:
    """Lower case, without vendor words, separators and punctuation."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in ("nvidia", "geforce", "tesla", "amd", "instinct"))
