"""Bytes and counts as text; the only place where bytes become something else."""

from __future__ import annotations

GIB = 1 << 30


def gib(nbytes: int, *, signed: bool = False) -> str:
    """GiB (2**30 bytes) with enough digits to see it; exact zero is `0`.

    >>> gib(16381470720), gib(17039360), gib(0), gib(4096)
    ('15.26', '0.016', '0', '<0.001')
    """
    if nbytes == 0:
        return "0"
    value = nbytes / GIB
    if abs(value) >= 0.1:
        text = f"{value:.2f}"
    elif abs(value) >= 0.0005:
        text = f"{value:.3f}"
    else:
        return "<0.001"
    return f"+{text}" if signed and value > 0 else text


def size(nbytes: int) -> str:
    """Bytes in the unit that suits them, binary units throughout.

    >>> size(1244659712), size(33554432), size(8192), size(4)
    ('1.16 GiB', '32.0 MiB', '8.0 KiB', '4 B')
    """
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}" if name == "GiB" else f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"


def count(number: int) -> str:
    """A parameter count in the unit that people use.

    >>> count(8190735360), count(124439808), count(960)
    ('8.19 B', '124.4 M', '960')
    """
    if number >= 10**9:
        return f"{number / 10**9:.2f} B"
    if number >= 10**6:
        return f"{number / 10**6:.1f} M"
    return f"{number:,}"
