"""The settings of PyTorch's CUDA caching allocator, as PYTORCH_CUDA_ALLOC_CONF spells them.

Sources: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h of torch 2.13 (keys, constants, tokens); for the
values the parser in torch itself, which the tests ask. Settings of pinned host memory and of locking are accepted: they
move no byte on the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from metapeak.tracer.errors import InputError, UnknownName

MIB = 1 << 20
MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = MIB  # kSmallSize: requests up to this go to the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
MIN_LARGE_ALLOC_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own size
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge
DEFAULT_LARGE_SEGMENT_MB = 20
POWER2_ENTRIES = 16  # kRoundUpPowerOfTwoIntervals: 1 MiB, 2 MiB, ... 32 GiB


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorConfig:
    """Settings of the allocator; the defaults are PyTorch's. Sizes are in bytes, None is unlimited.

    `power2_divisions` has an entry for each of 1 MiB, 2 MiB, 4 MiB ... 32 GiB; 0 and 1 round nothing. `text` is the
    setting as it was given.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = DEFAULT_LARGE_SEGMENT_MB * MIB
    garbage_collection_threshold: float = 0.0
    power2_divisions: tuple[int, ...] = (0,) * POWER2_ENTRIES
    large_segment_bytes: int = DEFAULT_LARGE_SEGMENT_MB * MIB
    memory_fraction: float = 1.0
    throw_on_oom: bool = False
    text: str = field(default="", compare=False)

    def round_size(self, nbytes: int) -> int:
        """Bytes of the block that a request of `nbytes` needs.

        >>> AllocatorConfig().round_size(1), AllocatorConfig().round_size(513)
        (512, 1024)
        >>> parse_allocator_config("roundup_power2_divisions:4").round_size(1200 << 20) >> 20
        1280
        """
        if nbytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        level = nbytes.bit_length() - 1
        divisions = self.power2_divisions[min(max(level - 20, 0), POWER2_ENTRIES - 1)]
        if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
            floor = 1 << level
            if nbytes == floor:
                return nbytes
            step = floor // divisions
            return -(-nbytes // step) * step if step else floor << 1
        return -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def segment_bytes(self, rounded: int) -> int:
        """Bytes of the segment that is asked of the driver for a rounded request that no cached block can take."""
        if rounded <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if rounded < MIN_LARGE_ALLOC_BYTES:
            return self.large_segment_bytes
        return -(-rounded // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES

    def page_bytes(self, *, small: bool) -> int:
        """Bytes of a page of an expandable segment."""
        return SMALL_SEGMENT_BYTES if small else self.large_segment_bytes

    def allowed_bytes(self, device_bytes: int) -> int:
        """The most that the memory fraction lets the process reserve on a device of `device_bytes`."""
        return int(self.memory_fraction * device_bytes)


DEFAULT_CONFIG = AllocatorConfig()


def parse_allocator_config(text: str) -> AllocatorConfig:
    """The settings in `text`, as `max_split_size_mb:128,expandable_segments:True`; an empty text is the default.

    Raises UnknownName for a key that PyTorch has not, InputError for a value that it would refuse and for a backend
    other than the native one.
    """
    pairs = _pairs(text)
    for key, _ in pairs:
        if key not in _KEYS:
            raise UnknownName("allocator setting", key, _KEYS, f"In '{text}'; they are written key:value,key:value.")
    # The size of large segments is read first, wherever it stands: other sizes are held against it and follow it.
    pairs.sort(key=lambda pair: pair[0] != "large_segment_size_mb")
    config = AllocatorConfig(text=text)
    for key, value in pairs:
        config = replace(config, **_KEYS[key](key, value))
        if key == "large_segment_size_mb":
            config = replace(config, max_non_split_rounding_bytes=config.large_segment_bytes)
        _check_least(key, config)
    return config


def _check_least(key: str, config: AllocatorConfig) -> None:
    """Sizes above which nothing is split are at least a large segment."""
    sizes = {
        "max_split_size_mb": config.max_split_bytes,
        "max_non_split_rounding_mb": config.max_non_split_rounding_bytes,
    }
    least = config.large_segment_bytes
    if key in sizes and sizes[key] < least:
        raise InputError(
            f"Allocator setting {key} is {sizes[key] // MIB}, but has to be {least // MIB} or more (MiB): the size of "
            "large segments."
        )


def config_of_snapshot(settings: Mapping[str, Any]) -> AllocatorConfig:
    """The settings that a snapshot's `allocator_settings` record; an empty mapping (older files) is the default.

    The resolved fields win over the text, since a program can change them after it started.
    Raises InputError and UnknownName as `parse_allocator_config`.
    """
    text = settings.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if not isinstance(text, str):
        raise InputError(f"The snapshot's allocator settings are {text!r}, but should be a text.")
    config = parse_allocator_config(text)
    resolved: dict[str, Any] = {}
    if isinstance(settings.get("expandable_segments"), bool):
        resolved["expandable_segments"] = settings["expandable_segments"]
    limit = settings.get("max_split_size")
    if isinstance(limit, int) and not isinstance(limit, bool):
        resolved["max_split_bytes"] = limit if 0 <= limit < 1 << 62 else None
    threshold = settings.get("garbage_collection_threshold")
    if isinstance(threshold, float) and 0 <= threshold < 1:
        resolved["garbage_collection_threshold"] = threshold
    table = settings.get("roundup_power2_divisions")
    if isinstance(table, Mapping) and table:
        resolved["power2_divisions"] = _recorded_divisions(table)
    return replace(config, **resolved)


def _recorded_divisions(table: Mapping) -> tuple[int, ...]:
    values = [table.get(str(1 << entry), 0) for entry in range(POWER2_ENTRIES)]
    for value in values:
        if not isinstance(value, int) or value < 0 or value & (value - 1):
            raise InputError(f"The snapshot's roundup_power2_divisions hold {value!r}, which is no power of 2.")
    return tuple(values)


def _pairs(text: str) -> list[tuple[str, str]]:
    """(key, value) pairs; a value in brackets may hold commas."""
    compact = re.sub(r"\s", "", text)
    if not compact:
        return []
    pairs = []
    for item in re.split(r",(?![^\[]*\])", compact):
        key, colon, value = item.partition(":")
        if not colon or not key or not value:
            raise InputError(
                f"Allocator setting '{item}' in '{text}' is no key:value. Write it as "
                "expandable_segments:True,max_split_size_mb:128."
            )
        pairs.append((key, value))
    return pairs


def _number(key: str, value: str, kind: Callable[[str], float]) -> Any:
    try:
        number = kind(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise InputError(f"Allocator setting {key} is '{value}', but has to be a number.")
    return number


def _megabytes(name: str, *, least: int) -> Callable[[str, str], dict[str, Any]]:
    def parse(key: str, value: str) -> dict[str, Any]:
        megabytes = _number(key, value, int)
        if not least <= megabytes < 1 << 40:
            raise InputError(f"Allocator setting {key} is {megabytes}, but has to be {least} or more (MiB).")
        return {name: megabytes * MIB}

    return parse


def _boolean(name: str | None) -> Callable[[str, str], dict[str, Any]]:
    def parse(key: str, value: str) -> dict[str, Any]:
        if value not in ("True", "False"):
            raise InputError(f"Allocator setting {key} is '{value}', but has to be True or False.")
        return {name: value == "True"} if name else {}

    return parse


def _threshold(key: str, value: str) -> dict[str, Any]:
    threshold = _number(key, value, float)
    if not 0 < threshold < 1:
        raise InputError(f"Allocator setting {key} is {value}, but has to lie between 0 and 1.")
    return {"garbage_collection_threshold": threshold}


def _fraction(key: str, value: str) -> dict[str, Any]:
    fraction = _number(key, value, float)
    if not 0 <= fraction <= 1:
        raise InputError(f"Allocator setting {key} is {value}, but has to lie between 0 and 1.")
    return {"memory_fraction": fraction}


def _backend(key: str, value: str) -> dict[str, Any]:
    if value == "native":
        return {}
    if value == "cudaMallocAsync":
        raise InputError(
            "Allocator backend cudaMallocAsync is the driver's own pool, which is not modelled. Leave backend out."
        )
    raise UnknownName("allocator backend", value, ("native", "cudaMallocAsync"))


def _power2(key: str, value: str) -> dict[str, Any]:
    """One number for all sizes, or [256:1,512:2,>:8]: the first entry fills downward, `>` upward."""
    if not value.startswith("["):
        return {"power2_divisions": (_division(key, value),) * POWER2_ENTRIES}
    if not value.endswith("]"):
        raise InputError(f"Allocator setting {key} is '{value}': the closing bracket is missing.")
    table = [0] * POWER2_ENTRIES
    last = 0
    first = True
    for item in value[1:-1].split(","):
        size, colon, divisions = item.partition(":")
        if not colon:
            raise InputError(f"Allocator setting {key} holds '{item}', but takes pairs as [256:1,512:2,>:8].")
        number = _division(key, divisions)
        if size == ">":
            table[last + 1 :] = [number] * (POWER2_ENTRIES - last - 1)
            continue
        megabytes = _number(key, size, int)
        if megabytes < 1 or megabytes & (megabytes - 1):
            raise InputError(f"Allocator setting {key} names a size of {size} MiB, which is no power of 2.")
        entry = min(megabytes.bit_length() - 1, POWER2_ENTRIES - 1)
        if first:
            table[:entry] = [number] * entry
            first = False
        table[entry] = number
        last = entry
    return {"power2_divisions": tuple(table)}


def _division(key: str, value: str) -> int:
    number = _number(key, value, int)
    if number & (number - 1):
        raise InputError(f"Allocator setting {key} has {value} divisions, but takes 0 or a power of 2.")
    return number


def _anything(key: str, value: str) -> dict[str, Any]:
    return {}


_KEYS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "expandable_segments": _boolean("expandable_segments"),
    "max_split_size_mb": _megabytes("max_split_bytes", least=1),
    "max_non_split_rounding_mb": _megabytes("max_non_split_rounding_bytes", least=1),
    "garbage_collection_threshold": _threshold,
    "roundup_power2_divisions": _power2,
    "large_segment_size_mb": _megabytes("large_segment_bytes", least=11),
    "per_process_memory_fraction": _fraction,
    "throw_on_cudamalloc_oom": _boolean("throw_on_oom"),
    "backend": _backend,
    "graph_capture_record_stream_reuse": _boolean(None),
    "release_lock_on_cudamalloc": _boolean(None),
    "release_lock_on_hipmalloc": _boolean(None),
    "pinned_use_cuda_host_register": _boolean(None),
    "pinned_use_hip_host_register": _boolean(None),
    "pinned_use_background_threads": _boolean(None),
    "pinned_free_catch_all": _boolean(None),
    "pinned_num_register_threads": _anything,
    "pinned_reserve_segment_size_mb": _anything,
    "pinned_max_round_threshold_mb": _anything,
    "pinned_max_cached_size_mb": _anything,
}
