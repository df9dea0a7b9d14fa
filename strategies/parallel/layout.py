"""How ranks are arranged: degrees of parallelism, coordinates, and the meshes that sharding runs over.

What it changes: nothing by itself; strategies ask it for their axis.
Order of the axes, slowest first: pp, dp_replicate, dp_shard, cp, tp, so that the ranks that talk most are neighbours.
`ep` is no axis of its own: experts are spread over the same ranks in another way, pp x dp_replicate x efsdp x ep, where
efsdp = dp_shard x cp x tp / ep ranks hold the same experts and shard them between each other.
Sources: torchtitan distributed/parallel_dims.py; transformers 5.24 distributed/utils.py (TransformersDeviceMesh) and
configuration_utils.py (DistributedConfig).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from metapeak.tracer.errors import InputError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
MAX_DEGREE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of parallelism; 1 is none. The world is the product of all but ep.

    >>> layout = Layout(dp_shard=4, tp=2, ep=4)
    >>> layout.world_size, layout.fsdp, layout.efsdp, layout.coordinates(5)
    (8, 4, 2, {'pp': 0, 'dp_replicate': 0, 'dp_shard': 2, 'cp': 0, 'tp': 1})
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self):
        for field in fields(self):
            degree = getattr(self, field.name)
            if not isinstance(degree, int) or isinstance(degree, bool) or not 1 <= degree <= MAX_DEGREE:
                raise InputError(f"{field.name} is {degree!r}, but a degree is a whole number from 1 to {MAX_DEGREE}.")
        if self.ep == 1:
            return
        ranks = self.fsdp * self.tp
        if self.ep % self.tp:
            raise InputError(
                f"ep {self.ep} / tp {self.tp} = {self.ep / self.tp:.2f} is no whole number: experts are not cut by tp, "
                "the ranks of a tp group hold different ones."
            )
        if ranks % self.ep:
            raise InputError(
                f"dp_shard {self.dp_shard} x cp {self.cp} x tp {self.tp} / ep {self.ep} = {ranks / self.ep:.2f} is no "
                "whole number: expert parallelism borrows its ranks from these."
            )

    @property
    def degrees(self) -> dict[str, int]:
        """Degree by axis, slowest axis first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def fsdp(self) -> int:
        """Ranks that FSDP shards over: those with other data and those with another part of the sequence."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks that hold the same experts."""
        return self.fsdp * self.tp // self.ep

    @property
    def groups(self) -> tuple[int, ...]:
        """Sizes of the process groups that a rank talks in: the world's, and one for each axis that is not all of it.

        Source: torch.distributed makes a communicator for a group when it is first used; init_device_mesh takes the
        world's own for an axis as long as the world.
        """
        axes = [degree for axis, degree in self.degrees.items() if 1 < degree < self.world_size]
        if self.cp > 1 and self.dp_shard > 1 and self.fsdp < self.world_size:
            axes.append(self.fsdp)
        if self.ep > 1:
            axes += [degree for degree in (self.efsdp, self.ep) if 1 < degree < self.world_size]
        return (self.world_size, *axes)

    def check_world(self, world_size: int) -> None:
        """Raise InputError, with the equation, when the degrees do not multiply to the number of GPUs."""
        if self.world_size != world_size:
            equation = " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items() if degree > 1) or "1"
            raise InputError(f"{equation} = {self.world_size} ranks, but there are {world_size} GPUs.")

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        found: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in AXES}

    def rank_classes(
        self, sizes: Iterable[int], expert_sizes: Iterable[int] = (), *, sequence_parts: bool = False
    ) -> list[tuple[int, int]]:
        """(first rank, count) of the ranks that hold the same bytes, first rank first.

        `sizes` are those of the dimensions that FSDP cuts, `expert_sizes` of those that it cuts over efsdp. With
        `sequence_parts` the place on cp matters, whether it is the first, the last or between: context_parallel.py.
        """
        ranks = np.arange(self.world_size)
        kinds = [_shard_kind(ranks // self.tp % self.fsdp, self.fsdp, sizes)]
        kinds.append(_shard_kind(ranks // self.ep % self.efsdp, self.efsdp, expert_sizes))
        if sequence_parts:
            kinds.append(np.clip(ranks // self.tp % self.cp, 0, 1) + (ranks // self.tp % self.cp == self.cp - 1))
        _, firsts, counts = np.unique(np.stack(kinds), axis=1, return_index=True, return_counts=True)
        return sorted((int(first), int(count)) for first, count in zip(firsts, counts, strict=True))


def _shard_kind(places: np.ndarray, degree: int, sizes: Iterable[int]) -> np.ndarray:
    """A number by place on an axis of that degree, the same one where shards of dimensions of these sizes are alike.

    A dimension is cut into chunks of ceil(size / degree): so places with whole chunks come first, then one with the
    rest, then empty ones.
    """
    cuts = {0}
    for size in set(sizes):
        chunk = -(-size // degree)
        whole, rest = divmod(size, chunk) if chunk else (0, 0)
        cuts |= {whole, whole + 1} if rest else {whole}
    return np.searchsorted(sorted(cuts), places, side="right")


NO_LAYOUT = Layout()
