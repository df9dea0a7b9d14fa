"""What lies beside the allocator's segments, the verdict, and slices of cards."""

import pytest

from metapeak.tracer.device.overheads import Overhead, Overheads, device_bytes, overheads
from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.gpus import GIB, MIB, find_gpu, gpu_of_memory
from metapeak.tracer.kernels import device_of
from metapeak.tracer.mig import all_slices, find_gpu_or_slice
from metapeak.tracer.simulation import Verdict, verdict_for

REPORTED = 1_600_000_000  # bytes of one communicator's all-reduce, NVIDIA/nccl issue 864


def by_name(found):
    return {item.name: (item.low_bytes, item.high_bytes) for item in found.items}


def test_every_item_is_a_range_with_a_tag_and_a_source():
    for gpu in (None, find_gpu("h100"), find_gpu("mi300x"), gpu_of_memory("24GiB")):
        found = overheads(gpu, groups=(8, 2))
        for item in found.items:
            assert 0 <= item.low_bytes < item.high_bytes
            assert item.tag in ("assumed", "derived")
            assert item.source
        assert found.low_bytes == sum(low for low, _ in by_name(found).values())


@pytest.mark.parametrize(
    ("measured_mib", "what"),
    [
        (256, "RTX 3090, context alone"),
        (426, "RTX 6000 Ada, context alone"),
        (657, "A100-80GB, all at an out of memory"),
    ],
)
def test_published_measurements_lie_in_the_range(measured_mib, what):
    context = by_name(overheads(None))["cuda_context"]
    total = overheads(None)
    low, high = context if "alone" in what else (total.low_bytes, total.high_bytes)
    assert low <= measured_mib * MIB <= high


def test_eager_module_loading_takes_a_gigabyte_or_more():
    """RTX 3090, CUDA 11.0, by nvidia-smi 1,644 MiB with one tensor of 156 MiB."""
    low, high = by_name(overheads(None, lazy_loading=False))["cuda_context"]
    assert low <= (1644 - 156) * MIB <= high
    assert low > by_name(overheads(None))["cuda_context"][1]


def test_a_group_of_one_has_no_communicator():
    assert set(by_name(overheads(None, groups=(1, 1)))) == {"cuda_context", "libraries"}


def test_communicators_by_hand():
    """Two ranks: 2 to 32 channels of 12 MiB, a connection each way at most. More ranks: at most what was reported."""
    assert by_name(overheads(None, groups=(2,)))["communicators"] == (2 * 12 * MIB, 32 * 12 * MIB * 2)
    assert by_name(overheads(None, groups=(8,)))["communicators"] == (24 * MIB, REPORTED)
    # eight H100: 16 channels x 2 MiB x 8 ranks of NVLink SHARP
    hopper = by_name(overheads(find_gpu("h100"), groups=(8,)))["communicators"]
    assert hopper == (24 * MIB, REPORTED + 256 * MIB)
    two = by_name(overheads(None, groups=(8, 2)))["communicators"]
    assert two == (48 * MIB, REPORTED + 32 * 12 * MIB * 2)


def test_device_bytes_are_reserved_and_overheads():
    extra = Overheads(items=(Overhead(name="x", low_bytes=3, high_bytes=5, tag="assumed", source="a test"),))
    assert device_bytes(100, extra) == (103, 105)
    assert device_bytes((100, 200), extra) == (103, 205)
    assert extra.expected_bytes == 4


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(9, 10, Verdict.FITS), (9, 11, Verdict.BORDERLINE), (10, 12, Verdict.BORDERLINE), (11, 13, Verdict.DOES_NOT_FIT)],
)
def test_verdict_uses_both_ends(low, high, verdict):
    fit = verdict_for(gpu_of_memory("10GiB"), (low * GIB, high * GIB), low * GIB + 5)
    assert fit.verdict is verdict
    assert fit.headroom_bytes == 10 * GIB - low * GIB - 5


# -- MIG ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gib", "multiprocessors"),
    [
        ("a100-40gb:1g.5gb", 4.75, 14),  # nvidia-smi mig -lgip
        ("H100:1g.10gb", 9.75, 16),
        ("h100-sxm:MIG-3g.40gb", 39.5, 60),
        ("a100-80gb:3g.40gb", 39.5, 42),  # CUDA: 42.4 GB, 42 multiprocessors
        ("a30:2g.12gb", None, 28),
    ],
)
def test_slices_have_their_share(name, gib, multiprocessors):
    found = find_gpu_or_slice(name)
    card = find_gpu(name.partition(":")[0])
    assert found.usable_bytes == (gib * GIB if gib else pytest.approx(card.usable_bytes / 2 * 0.96, abs=1))
    assert found.id.startswith(card.id + ":")
    device = device_of(found)
    assert device.multiprocessors == multiprocessors
    assert device.compute_capability == card.compute_capability


def test_no_slice_is_larger_than_its_card():
    for found in all_slices():
        assert 0 < found.usable_bytes < find_gpu(found.id.partition(":")[0]).usable_bytes


def test_unknown_profiles_and_cards_are_refused():
    with pytest.raises(UnknownName, match=r"1g\.11gb.*1g\.10gb"):
        find_gpu_or_slice("h100:1g.11gb")
    with pytest.raises(InputError, match="t4 is not known to be sliced"):
        find_gpu_or_slice("t4:1g.2gb")
    assert find_gpu_or_slice("t4") == find_gpu("t4")


def test_every_nvidia_gpu_of_the_catalogue_has_multiprocessors():
    from metapeak.tracer.gpus import all_gpus
    from metapeak.tracer.kernels.device import knows

    assert [gpu.id for gpu in all_gpus() if gpu.vendor == "NVIDIA" and not knows(gpu)] == []
