"""Allocator settings, held against the parser that torch itself has (it is in the CPU build, too)."""

import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metapeak.tracer.device.allocator_config import (
    DEFAULT_CONFIG,
    AllocatorConfig,
    config_of_snapshot,
    parse_allocator_config,
)
from metapeak.tracer.errors import InputError, UnknownName

MIB = 1 << 20


@pytest.fixture(scope="module")
def torch_parser():
    """A function from a text to torch's own settings: divisions, [large segment, max split, max non-split rounding]."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    prefix = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig"
    divisions = getattr(library, prefix + "24roundup_power2_divisionsEm")
    divisions.restype, divisions.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    instance = getattr(library, prefix + "8instanceEv")
    instance.restype = ctypes.c_void_p

    def parse(text):
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")  # which an empty text does not reset
        torch._C._accelerator_setAllocatorSettings(text)
        return [divisions(MIB << entry) for entry in range(16)], list((ctypes.c_size_t * 3).from_address(instance()))

    before = torch._C._accelerator_getAllocatorSettings()
    yield parse
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    torch._C._accelerator_setAllocatorSettings(before)


ACCEPTED = [
    "",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[>:8]",
    "roundup_power2_divisions:[2:4,256:1]",
    "roundup_power2_divisions:[65536:4]",
    "roundup_power2_divisions:[128:8,256:16,512:1,2048:8,>:1]",
    "max_split_size_mb:20",
    "max_split_size_mb:512,expandable_segments:True",
    " max_split_size_mb : 64 , expandable_segments : False ",
    "large_segment_size_mb:11",
    "large_segment_size_mb:64,max_split_size_mb:64",
    "max_split_size_mb:64,large_segment_size_mb:64",
    "max_non_split_rounding_mb:50,large_segment_size_mb:40",
    "max_non_split_rounding_mb:33",
    "garbage_collection_threshold:0.8",
    "per_process_memory_fraction:0.5,pinned_num_register_threads:4",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_settings_mean_what_torch_takes_them_for(text, torch_parser):
    divisions, (large_segment, max_split, max_rounding) = torch_parser(text)
    config = parse_allocator_config(text)
    assert list(config.power2_divisions) == divisions
    assert config.large_segment_bytes == large_segment
    assert (config.max_split_bytes or 2**64 - 1) == max_split
    assert config.max_non_split_rounding_bytes == max_rounding


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:5",
        "max_split_size_mb:x",
        "max_split_size_mb",
        "max_non_split_rounding_mb:5",
        "large_segment_size_mb:10",
        "large_segment_size_mb:64,max_split_size_mb:30",
        "max_split_size_mb:30,large_segment_size_mb:64",
        "max_non_split_rounding_mb:33,large_segment_size_mb:40",
        "garbage_collection_threshold:1.0",
        "garbage_collection_threshold:0",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[3:4]",
        "roundup_power2_divisions:[256:3]",
        "expandable_segments:true",
    ],
)
def test_what_torch_refuses_is_refused(text, torch_parser):
    with pytest.raises((RuntimeError, ValueError)):
        torch_parser(text)
    with pytest.raises(InputError) as caught:
        parse_allocator_config(text)
    assert len(str(caught.value).splitlines()) == 1
    assert any(word.split(":")[0] in str(caught.value) for word in text.split(","))


def test_an_unknown_setting_names_the_nearest_known_one():
    with pytest.raises(UnknownName, match="expandable_segments"):
        parse_allocator_config("expandable_segment:True")
    with pytest.raises(UnknownName, match="native"):
        parse_allocator_config("backend:other")
    with pytest.raises(InputError, match="cudaMallocAsync"):
        parse_allocator_config("backend:cudaMallocAsync")


@pytest.mark.parametrize(
    "text, size, rounded",
    [
        ("", 1, 512),
        ("", 512, 512),
        ("", 513, 1024),
        ("roundup_power2_divisions:4", 1 << 20, 1 << 20),  # a power of 2 stays
        ("roundup_power2_divisions:4", (1 << 20) + 1, 5 << 18),  # steps of 256 KiB above 1 MiB
        ("roundup_power2_divisions:4", 2048, 2048),  # not more than 512 x 4: multiples of 512
        ("roundup_power2_divisions:4", 2049, 2560),
        ("roundup_power2_divisions:1", (1 << 20) + 1, (1 << 20) + 512),  # 1 rounds nothing
        ("roundup_power2_divisions:[4:8,>:2]", (3 << 20) + 1, (3 << 20) + (256 << 10)),  # 2 MiB / 8: filled downward
        ("roundup_power2_divisions:[4:8,>:2]", (9 << 20) + 1, 12 << 20),  # 8 MiB / 2: filled upward
    ],
)
def test_rounding(text, size, rounded):
    assert parse_allocator_config(text).round_size(size) == rounded


@settings(max_examples=300, derandomize=True)
@given(size=st.integers(1, 1 << 36), divisions=st.sampled_from([0, 1, 2, 4, 8, 16, 64]))
def test_rounding_is_the_next_step(size, divisions):
    rounded = AllocatorConfig(power2_divisions=(divisions,) * 16).round_size(size)
    assert rounded >= size
    if divisions > 1 and size > 512 * divisions:
        floor = 1 << (size.bit_length() - 1)
        steps = [floor + step * floor // divisions for step in range(divisions + 1)]
        assert rounded == min(step for step in steps if step >= size)
    else:
        assert rounded % 512 == 0 and rounded - max(size, 1) < 512


def test_settings_of_a_snapshot():
    assert config_of_snapshot({}) == DEFAULT_CONFIG
    recorded = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": True,
        "roundup_power2_divisions": {str(1 << entry): 0 for entry in range(16)},
    }
    assert config_of_snapshot(recorded) == AllocatorConfig(expandable_segments=True)
    changed = {**recorded, "expandable_segments": False, "max_split_size": 128 * MIB}
    assert config_of_snapshot(changed) == AllocatorConfig(max_split_bytes=128 * MIB)
    with pytest.raises(UnknownName):
        config_of_snapshot({"PYTORCH_CUDA_ALLOC_CONF": "nonsense:1"})
    with pytest.raises(InputError):
        config_of_snapshot({"roundup_power2_divisions": {"1": 3}})
