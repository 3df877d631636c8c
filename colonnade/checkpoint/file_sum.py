"""Check sums of files: what tells a whole file from a damaged one.

[Note: check sums]
A CRC of gigabytes takes as long as writing them. Of tensors the 64-bit words are added up instead, for each block of 1 MiB, at
the speed of memory; the check sum is the total of these sums, which any changed byte changes, and the CRC-32 of the header and
of the sums, which tells where they belong. Of other files it is the CRC-32 of their bytes.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colonnade.checkpoint.tensor_header import SUFFIX, parse_header, said
from colonnade.errors import CheckpointError, explain

SUMMED = 1 << 17  # 64-bit words of which a check sum keeps one sum
BLOCK = 16 << 20  # bytes that are read at once: whole blocks of a check sum


@dataclass(frozen=True)
class FileSum:
    """What tells a whole file from a damaged one: its length in bytes, and a check sum; see [Note: check sums]."""

    nbytes: int
    digest: str


class TensorSum:
    """Adds up a file of tensors; see [Note: check sums]."""

    def __init__(self, header: bytes) -> None:
        self.crc, self.total = zlib.crc32(header), 0

    def add(self, data: memoryview) -> None:
        """A tensor's bytes, or a part of them that begins with a block."""
        import numpy

        words = numpy.frombuffer(data, "<i8", len(data) // 8)
        whole = len(words) - len(words) % SUMMED
        sums = words[:whole].reshape(-1, SUMMED).sum(1)
        rest = numpy.array([words[whole:].sum(), int.from_bytes(data[len(words) * 8 :], "little")], "<i8")
        for each in (sums, rest):
            self.crc = zlib.crc32(each.data, self.crc) if each.size else self.crc
            self.total += int(each.sum())

    @property
    def digest(self) -> str:
        return f"{self.crc:08x}{self.total % 2**64:016x}"


def checksum(file: Path) -> FileSum:
    """Of a file as it is on disk.

    Raises:
        OSError: it cannot be read.
        ValueError, KeyError, TypeError: it should be a file of tensors, and is none.
    """
    nbytes = file.stat().st_size
    with open(file, "rb", buffering=0) as opened:
        if file.suffix != SUFFIX:
            crc = 0
            for block in _blocks(opened, nbytes):
                crc = zlib.crc32(block, crc)
            return FileSum(nbytes, f"{crc:08x}")
        _, entries = parse_header(lambda start, stop: os.pread(opened.fileno(), stop - start, start), nbytes)
        tensors = sorted(entries.values(), key=lambda entry: (entry.start, entry.nbytes))
        found = TensorSum(opened.read(tensors[0].start if tensors else nbytes))
        for entry in tensors:
            for block in _blocks(opened, entry.nbytes) if entry.nbytes else [memoryview(b"")]:
                found.add(block)
        return FileSum(nbytes, found.digest)


def _blocks(opened: Any, nbytes: int) -> Iterator[memoryview]:
    """The next bytes of a file, a block at a time."""
    block = bytearray(BLOCK)
    while nbytes:
        part = memoryview(block)[: min(nbytes, BLOCK)]
        filled = 0
        while filled < len(part):
            count = opened.readinto(part[filled:])
            if not count:
                raise OSError(f"it ends {nbytes - filled} bytes too early")
            filled += count
        nbytes -= filled
        yield part


def check_length(file: Path | str, nbytes: int, expected: FileSum) -> None:
    """Whether a file has the length of the one that was written.

    Raises:
        CheckpointError: naming it, what was expected and what is there.
    """
    if nbytes != expected.nbytes:
        found = "nothing" if nbytes < 0 else f"{nbytes} bytes"
        raise CheckpointError(
            explain(f"{file} is damaged.", [("expected", f"{expected.nbytes} bytes"), ("found", found)])
        )


def check_sum(file: Path, expected: FileSum, thorough: bool) -> None:
    """Whether a file is the one that was written.

    Args:
        thorough: read all of it; else only its length is looked at.

    Raises:
        CheckpointError: naming the file, what was expected and what is there.
    """
    try:
        length = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    check_length(file, length, expected)
    if not thorough:
        return
    try:
        found = checksum(file).digest
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = said(error)
    if found != expected.digest:
        rows = [("expected", f"check sum {expected.digest}"), ("found", found)]
        raise CheckpointError(explain(f"{file} is damaged.", rows))
