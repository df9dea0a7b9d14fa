"""The catalogue of instances: every row readable, names that lead to the GPU catalogue, the order of prices."""

import pytest

from metapeak.tracer.errors import UnknownName
from metapeak.tracer.gpus import all_gpus, find_gpu
from metapeak.tracer.instances import ACCELERATORS, all_instances, find_cloud, instances_with


def test_every_row_is_an_instance_with_a_source():
    instances = all_instances()
    known = {gpu.id for gpu in all_gpus()}
    assert len(instances) > 150
    assert all(instance.count > 0 and instance.source for instance in instances)
    assert {instance.gpu for instance in instances} - {None} <= known
    assert {instance.accelerator for instance in instances} == set(ACCELERATORS)


# Values of a provider that are neither the marketed size nor that in GiB: AWS shows what the driver shows of a B200,
# Azure lists 192 GB for the GB200 that its maker sells with 186.
OTHER_SIZES = {("b200-sxm", 179.06), ("gb200", 192.0)}


def test_memory_of_the_accelerators_agrees_with_the_gpu_catalogue():
    """The marketed gigabytes as they are, or taken as 10**9 bytes and given in GiB (0.2 %: providers round)."""
    import csv
    from importlib import resources

    text = resources.files("metapeak.tracer.catalogue").joinpath("instances.csv").read_text(encoding="utf-8")
    marketed = {gpu.id: gpu.marketed_gb for gpu in all_gpus()}
    for row in csv.DictReader(text.splitlines()):
        gpu = ACCELERATORS[row["accelerator"]]
        size = float(row["gpu_mem_gib"] or 0)
        if gpu and size and (gpu, size) not in OTHER_SIZES:
            in_gib = marketed[gpu] * 10**9 / 2**30
            assert size == marketed[gpu] or size == pytest.approx(in_gib, rel=0.002), row["instance_type"]


def test_instances_come_cheapest_first_and_hold_enough_cards():
    found = instances_with(find_gpu("h100"), 8)
    assert found and all(instance.count >= 8 for instance in found)
    prices = [instance.price_hour for instance in found]
    assert prices == sorted(prices)


def test_a_wrong_cloud_lists_the_known_ones():
    with pytest.raises(UnknownName, match="nebius"):
        find_cloud("nebious")
