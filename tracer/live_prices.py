"""Instances and prices of today, from the package gpuhunt, which reads dstack's catalogue and some providers' own.

Prices are of the cheapest location that lists an instance, on demand and spot apart. What gpuhunt does not say (links
between machines, local disks) is the built-in catalogue's where it has the same instance, else unknown.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from metapeak.tracer.errors import InputError
from metapeak.tracer.instances import Instance, all_instances

# (gpuhunt's name, GiB) -> id of the GPU catalogue. Cards that come in several forms are taken for the usual one in
# clouds: SXM where there is one. Other cards have no id, as in the built-in catalogue.
_GPUS = {
    ("A10", 24): "a10", ("A100", 40): "a100-40gb-sxm", ("A100", 80): "a100-80gb-sxm", ("A10G", 24): "a10g",
    ("A6000", 48): "rtx-a6000", ("B200", 180): "b200-sxm", ("B200", 192): "b200-sxm", ("H100", 80): "h100-sxm",
    ("H100NVL", 94): "h100-nvl", ("H200", 141): "h200-sxm", ("L4", 24): "l4", ("L40S", 48): "l40s",
    ("MI300X", 192): "mi300x", ("RTX3090", 24): "rtx-3090", ("RTX4090", 24): "rtx-4090", ("T4", 16): "t4",
    ("V100", 16): "v100-16gb-sxm2", ("V100", 32): "v100-32gb-sxm2",
}  # fmt: skip


def live_instances() -> tuple[Instance, ...]:
    """What gpuhunt lists with whole accelerators. Raises InputError without the package or an answer."""
    try:
        gpuhunt = importlib.import_module("gpuhunt")
    except ImportError as error:
        raise InputError(f"Prices of today need gpuhunt ({error}): pip install 'metapeak[prices]'") from None
    try:
        items = gpuhunt.query(min_gpu_count=1)
    except Exception as error:  # of whatever it reads the catalogue with
        raise InputError(
            f"gpuhunt has no catalogue to give: {type(error).__name__}: {error}. The built-in one needs no network."
        ) from error
    return tuple(_instances(items))


def _instances(items: Iterable[Any]) -> Iterable[Instance]:
    known = {(item.cloud, item.name): item for item in all_instances()}
    offers: dict[tuple, list[Any]] = {}
    for item in items:
        key = (item.provider, item.instance_name, item.gpu_name, item.gpu_memory, item.gpu_count)
        offers.setdefault(key, []).append(item)
    for (provider, name, gpu, memory, count), listed in offers.items():
        cheapest = {spot: _cheapest(item for item in listed if bool(item.spot) is spot) for spot in (False, True)}
        first, like = cheapest[False] or cheapest[True], known.get((provider, name))
        yield Instance(
            cloud=provider,
            name=name,
            accelerator=gpu or "",
            gpu=_GPUS.get((gpu, round(memory or 0))),
            count=float(count),
            vcpus=float(first.cpu),
            host_memory_gib=float(first.memory),
            price_hour=cheapest[False].price if cheapest[False] else None,
            spot_price_hour=cheapest[True].price if cheapest[True] else None,
            region=first.location,
            fabric=like.fabric if like else "",
            source="gpuhunt",
            gpu_link=like.gpu_link if like else "",
            local_nvme_gb=like.local_nvme_gb if like else None,
        )


def _cheapest(items: Iterable[Any]) -> Any:
    return min(items, key=lambda item: item.price, default=None)
