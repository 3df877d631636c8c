"""Numbers as a person reads them."""

from __future__ import annotations


def short_count(number: int) -> str:
    """A count, such as "4096", "12.5M" or "8.0B"."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= 10 * size or (number >= size and unit != "K"):
            return f"{number / size:.1f}{unit}"
    return str(number)


def short_bytes(number: int) -> str:
    """A number of bytes, such as "1.5 GiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
