"""How ranks are arranged: degrees of parallelism, coordinates, and the meshes that sharding runs over.

What it changes: nothing by itself; strategies ask it for their axis.
Order of the axes, slowest first: pp, dp_replicate, dp_shard, cp, tp, so that the ranks that talk most are neighbours.
Source: torchtitan distributed/parallel_dims.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from metapeak.tracer.errors import InputError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
MAX_DEGREE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of parallelism; 1 is none. The world is their product.

    >>> layout = Layout(dp_shard=4, tp=2)
    >>> layout.world_size, layout.coordinates(5)
    (8, {'pp': 0, 'dp_replicate': 0, 'dp_shard': 2, 'cp': 0, 'tp': 1})
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self):
        for field in fields(self):
            degree = getattr(self, field.name)
            if not isinstance(degree, int) or isinstance(degree, bool) or not 1 <= degree <= MAX_DEGREE:
                raise InputError(f"{field.name} is {degree!r}, but a degree is a whole number from 1 to {MAX_DEGREE}.")

    @property
    def degrees(self) -> dict[str, int]:
        """Degree by axis, slowest axis first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def groups(self) -> tuple[int, ...]:
        """Sizes of the process groups that a rank talks in: the world's, and one for each axis that is not all of it.

        Source: torch.distributed makes a communicator for a group when it is first used; init_device_mesh takes the
        world's own for an axis as long as the world.
        """
        axes = [degree for axis, degree in self.degrees.items() if 1 < degree < self.world_size]
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

    def rank_classes(self, sizes: Iterable[int]) -> list[tuple[int, int]]:
        """(first rank, count) of the ranks whose shards of dimensions of these sizes are alike, first rank first.

        A dimension is cut into chunks of ceil(size / dp_shard): so ranks with whole chunks come first, then one with
        the rest, then empty ones.
        """
        cuts = {0}
        for size in set(sizes):
            chunk = -(-size // self.dp_shard)
            whole, rest = divmod(size, chunk) if chunk else (0, 0)
            cuts |= {whole, whole + 1} if rest else {whole}
        firsts = sorted(cut for cut in cuts if cut < self.dp_shard)
        neighbours = self.cp * self.tp  # ranks that share a place on dp_shard, next to each other
        others = self.world_size // self.dp_shard
        return [
            (first * neighbours, (after - first) * others)
            for first, after in zip(firsts, [*firsts[1:], self.dp_shard], strict=True)
        ]


NO_LAYOUT = Layout()
