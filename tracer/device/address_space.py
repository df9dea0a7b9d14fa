"""What stands behind the allocator: who says whether the driver has memory left, and at which address it comes.

Addresses matter for one thing only: of equal free blocks the allocator takes the one at the lowest address.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from metapeak.tracer.device.allocator_config import MIB, SMALL_SEGMENT_BYTES

SLOT_BYTES = 32 * MIB
# Where invented segments start, counting down: below the user half of a 48-bit address space, as on Linux.
TOP_ADDRESS = 0x7FFF_0000_0000
# Where invented ranges of expandable segments start, counting up; wide enough apart for any device.
RANGE_BASE = 0x1_0000_0000_0000
RANGE_SPAN = 1 << 43


class Driver(Protocol):
    """The calls that the allocator makes. Sizes in bytes; None or False is out of memory."""

    def allocate(self, nbytes: int) -> int | None:
        """Address of a new segment (cudaMalloc)."""

    def reserve_range(self) -> int:
        """Address of a new range for an expandable segment (cuMemAddressReserve), which takes no memory."""

    def map(self, address: int, nbytes: int) -> bool:
        """Whether physical pages could be put behind [address, address + nbytes) (cuMemCreate, cuMemMap)."""

    def release(self, address: int, nbytes: int) -> None:
        """A segment or mapped pages went back."""


class InventedAddresses:
    """A driver with `capacity` bytes (None: without end) that hands out addresses as native Linux drivers mostly do.

    Segments larger than 2 MiB start at 32 MiB-aligned addresses, each below the one before; segments of 2 MiB fill such
    a slot from its low end. Source: the addresses in recorded histories, of which 60 to 100 % of the steps go down.

    >>> driver = InventedAddresses()
    >>> first, second = driver.allocate(64 << 20), driver.allocate(20 << 20)
    >>> first - second == 32 << 20
    True
    """

    def __init__(self, *, capacity: int | None = None, used: int = 0, top: int = TOP_ADDRESS):
        self.capacity, self.used = capacity, used
        self._lowest = top // SLOT_BYTES * SLOT_BYTES
        self._small_slot: list[int] = []
        self._ranges = 0

    def allocate(self, nbytes: int) -> int | None:
        if not self._take(nbytes):
            return None
        if nbytes != SMALL_SEGMENT_BYTES:
            return self._slots(nbytes)
        if not self._small_slot:
            slot = self._slots(SLOT_BYTES)
            self._small_slot = list(range(slot + SLOT_BYTES - SMALL_SEGMENT_BYTES, slot - 1, -SMALL_SEGMENT_BYTES))
        return self._small_slot.pop()

    def reserve_range(self) -> int:
        self._ranges += 1
        return RANGE_BASE + self._ranges * RANGE_SPAN

    def map(self, address: int, nbytes: int) -> bool:
        return self._take(nbytes)

    def release(self, address: int, nbytes: int) -> None:
        self.used -= nbytes

    def _take(self, nbytes: int) -> bool:
        if self.capacity is not None and self.used + nbytes > self.capacity:
            return False
        self.used += nbytes
        return True

    def _slots(self, nbytes: int) -> int:
        self._lowest -= -(-nbytes // SLOT_BYTES) * SLOT_BYTES
        return self._lowest


def top_below(addresses: Iterable[int]) -> int:
    """Where invented addresses can start so that they meet none of `addresses`: below them where there is room.

    Drivers that hand out low addresses (Windows, WSL2) go up, so there they start high above.
    """
    lowest = min(addresses, default=TOP_ADDRESS)
    return lowest if lowest > 1 << 44 else TOP_ADDRESS
