"""MIG: one card as several smaller ones, named `a100-80gb:3g.40gb`.

Source: NVIDIA MIG user guide, supported profiles (fractions of memory and multiprocessors); memory as `nvidia-smi mig
-lgip` lists it where a listing was seen (A100-40GB, H100), or as CUDA reports it (A100-80GB: 10.2, 20.9 and 42.4 GB).
Where none was seen: the fraction of what torch can use of the card, less 4 %, the largest difference in those lists.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from metapeak.tracer.errors import InputError, UnknownName
from metapeak.tracer.gpus import GIB, Gpu, all_gpus, find_gpu

_UNSEEN_SHARE = 0.96


@dataclass(frozen=True, slots=True)
class _Profile:
    name: str
    memory: float
    multiprocessors: int
    gib: float | None = None


_A100_40 = (
    _Profile("1g.5gb", 1 / 8, 14, 4.75), _Profile("1g.10gb", 2 / 8, 14, 9.75), _Profile("2g.10gb", 2 / 8, 28, 9.75),
    _Profile("3g.20gb", 4 / 8, 42, 19.62), _Profile("4g.20gb", 4 / 8, 56, 19.62), _Profile("7g.40gb", 1, 98),
)  # fmt: skip
_A100_80 = (
    _Profile("1g.10gb", 1 / 8, 14, 9.5), _Profile("1g.20gb", 2 / 8, 14, 19.5), _Profile("2g.20gb", 2 / 8, 28, 19.5),
    _Profile("3g.40gb", 4 / 8, 42, 39.5), _Profile("4g.40gb", 4 / 8, 56, 39.5), _Profile("7g.80gb", 1, 98),
)  # fmt: skip
_H100_80 = (
    _Profile("1g.10gb", 1 / 8, 16, 9.75), _Profile("1g.20gb", 2 / 8, 26, 19.62), _Profile("2g.20gb", 2 / 8, 32, 19.62),
    _Profile("3g.40gb", 4 / 8, 60, 39.5), _Profile("4g.40gb", 4 / 8, 64, 39.5), _Profile("7g.80gb", 1, 132),
)  # fmt: skip
_H200 = (
    _Profile("1g.18gb", 1 / 8, 16), _Profile("1g.35gb", 2 / 8, 26), _Profile("2g.35gb", 2 / 8, 32),
    _Profile("3g.71gb", 4 / 8, 60), _Profile("4g.71gb", 4 / 8, 64), _Profile("7g.141gb", 1, 132),
)  # fmt: skip
_A30 = (_Profile("1g.6gb", 1 / 4, 14), _Profile("2g.12gb", 2 / 4, 28), _Profile("4g.24gb", 1, 56))
_PROFILES = {
    "a30": _A30,
    "a100-40gb-sxm": _A100_40,
    "a100-40gb-pcie": _A100_40,
    "a100-80gb-sxm": _A100_80,
    "a100-80gb-pcie": _A100_80,
    "a800-80gb-sxm": _A100_80,
    "h100-sxm": _H100_80,
    "h100-pcie": _H100_80,
    "h800-sxm": _H100_80,
    "h200-sxm": _H200,
    "h200-nvl": _H200,
}


def find_gpu_or_slice(name: str) -> Gpu:
    """The GPU of that name, or with `CARD:PROFILE` a MIG slice of it.

    Raises UnknownName for an unknown card or profile, InputError for a card that is not sliced.

    >>> find_gpu_or_slice("a100-80gb:3g.40gb").id, find_gpu_or_slice("H100:1g.10gb").usable_bytes / GIB
    ('a100-80gb-sxm:3g.40gb', 9.75)
    """
    card_name, colon, profile_name = name.partition(":")
    card = find_gpu(card_name)
    if not colon:
        return card
    profiles = {profile.name: profile for profile in _PROFILES.get(card.id, ())}
    if not profiles:
        raise InputError(
            f"{card.id} is not known to be sliced by MIG. Cards that are: {', '.join(_PROFILES)}; "
            "or give --gpu-memory with the slice's size."
        )
    key = profile_name.strip().lower().removeprefix("mig-")
    if key not in profiles:
        raise UnknownName(f"MIG profile of {card.id}", profile_name, list(profiles))
    return _slice(card, profiles[key])


def all_slices() -> tuple[Gpu, ...]:
    """Every known MIG slice, in the order of the catalogue of cards."""
    return tuple(_slice(card, profile) for card in all_gpus() for profile in _PROFILES.get(card.id, ()))


def _slice(card: Gpu, profile: _Profile) -> Gpu:
    if profile.gib is not None:
        usable, origin = round(profile.gib * GIB), "the slice's memory as listed"
    else:
        usable, origin = round(card.usable_bytes * profile.memory * _UNSEEN_SHARE), "share of the card's, less 4 %"
    return replace(
        card,
        id=f"{card.id}:{profile.name}",
        name=f"{card.name} MIG {profile.name}",
        marketed_gb=float(profile.name.partition(".")[2].removesuffix("gb")),
        driver_total_bytes=None,
        usable_bytes=usable,
        usable_from=origin,
        multiprocessors=profile.multiprocessors,
    )
