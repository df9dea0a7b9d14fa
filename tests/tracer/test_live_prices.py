"""Instances from gpuhunt's items: the package's own class, a made catalogue, no network."""

import sys

import gpuhunt
import pytest
from gpuhunt import AcceleratorVendor, CatalogItem

from metapeak.tracer.errors import InputError
from metapeak.tracer.gpus import all_gpus
from metapeak.tracer.instances import all_instances
from metapeak.tracer.live_prices import _GPUS, live_instances


def item(name, price, *, provider="aws", location="here", gpu="H100", memory=80.0, count=8, spot=False):
    return CatalogItem(
        provider=provider, instance_name=name, location=location, price=price, cpu=192, memory=2048.0, gpu_count=count,
        gpu_name=gpu, gpu_memory=memory, spot=spot, disk_size=None, gpu_vendor=AcceleratorVendor.NVIDIA,
    )  # fmt: skip


@pytest.fixture
def catalogue(monkeypatch):
    def has(*items):
        asked = {}
        monkeypatch.setattr(gpuhunt, "query", lambda **filters: asked.update(filters) or list(items))
        return asked

    return has


def test_the_cheapest_location_counts_and_spot_is_apart(catalogue):
    asked = catalogue(
        item("p5.48xlarge", 60.0, location="there"),
        item("p5.48xlarge", 55.0, location="here"),
        item("p5.48xlarge", 20.0, location="else", spot=True),
    )
    (one,) = live_instances()
    assert asked == {"min_gpu_count": 1}
    assert (one.price_hour, one.spot_price_hour, one.region, one.count) == (55.0, 20.0, "here", 8)
    assert (one.gpu, one.cloud, one.source) == ("h100-sxm", "aws", "gpuhunt")
    known = next(row for row in all_instances() if row.name == "p5.48xlarge")
    assert (one.fabric, one.local_nvme_gb) == (known.fabric, known.local_nvme_gb)


def test_what_is_not_known_is_left_open(catalogue):
    catalogue(item("odd", 1.0, provider="somewhere", gpu="A5000", memory=24.0, count=1, spot=True))
    (one,) = live_instances()
    assert (one.gpu, one.price_hour, one.spot_price_hour, one.fabric, one.local_nvme_gb) == (None, None, 1.0, "", None)


def test_every_card_is_one_of_the_catalogue():
    assert set(_GPUS.values()) <= {gpu.id for gpu in all_gpus()}


def test_no_catalogue_to_be_had(monkeypatch):
    def fail(**filters):
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(gpuhunt, "query", fail)
    with pytest.raises(InputError, match="ConnectionError: nobody answers"):
        live_instances()


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    with pytest.raises(InputError, match=r"pip install 'metapeak\[prices\]'"):
        live_instances()
