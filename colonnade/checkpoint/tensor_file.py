"""Files of tensors in safetensors format, written from where the tensors lie and read to where they belong.

[Note: no copies]
The format is a header that says where each tensor is, and then their bytes. A contiguous tensor is handed to the operating
system as it lies in memory, and what is asked for is read into the memory that it is for: a save needs no memory, a load
none beside its targets, and nothing of a file stays mapped. Any safetensors reader reads these files.

[Note: check sums]
A CRC of gigabytes takes as long as writing them. Of tensors the 64-bit words are added up instead, for each block of 1 MiB, at
the speed of memory; the check sum is the total of these sums, which any changed byte changes, and the CRC-32 of the header and
of the sums, which tells where they belong. Of other files it is the CRC-32 of their bytes.
"""

from __future__ import annotations

import json
import math
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from colonnade.errors import CheckpointError, explain

KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {kind: dtype for dtype, kind in KINDS.items()}
SUFFIX = ".safetensors"
BLOCK = (
    16 << 20
)  # bytes that are read at once where they cannot go to their place directly; whole blocks of a check sum
SUMMED = 1 << 17  # 64-bit words of which a check sum keeps one sum
ALIGNMENT = 64  # of the first tensor


@dataclass(frozen=True)
class FileSum:
    """What tells a whole file from a damaged one: its length in bytes, and a check sum; see [Note: check sums]."""

    nbytes: int
    digest: str


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its format, its shape, and where its bytes begin in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    tensors: Mapping[str, torch.Tensor],
    file: Path,
    about: Mapping[str, str] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> FileSum:
    """Write a file and wait until it is on disk.

    Args:
        tensors: by key; views of any strides, on any device. One that is not contiguous in host memory is copied, alone.
        about: text to put into the header.
        meanwhile: called while the disk is at work.

    Raises:
        CheckpointError: safetensors has no word for the format of one.
        OSError: it cannot be written.
    """
    header, order = _header(tensors, about or {})
    with open(file, "wb", buffering=0) as opened:
        nbytes = _write_all(opened, header)
        for key in order:
            nbytes += _write_all(opened, _bytes_of(tensors[key]))
        synced, found = _Synced(opened.fileno()), _Sum(header)
        try:
            for key in order:
                found.add(_bytes_of(tensors[key]))
            meanwhile()
        finally:
            synced.wait()
    return FileSum(nbytes, found.digest)


class _Sum:
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


class _Synced:
    """An fsync that goes on beside this thread."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fsync")
        self._thread.start()

    def _run(self) -> None:
        try:
            os.fsync(self.descriptor)
        except BaseException as error:  # raised by `wait`
            self.error = error

    def wait(self) -> None:
        self._thread.join()
        if self.error is not None:
            raise self.error


def _header(tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """The header, and the keys in the order of their bytes: wide formats first, so that each is aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    order = sorted(tensors, key=lambda key: -tensors[key].element_size())
    offset = 0
    for key in order:
        tensor = tensors[key]
        if tensor.dtype not in KINDS:
            raise CheckpointError(f"{key} is of format {tensor.dtype}, which a safetensors file cannot hold.")
        end = offset + tensor.numel() * tensor.element_size()
        entries[key] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, order


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return _raw(tensor.detach().to("cpu").contiguous())


def _raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory. (Of one with a single entry the stride may be any number.)"""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _write_all(opened: Any, data: bytes | memoryview) -> int:
    left = memoryview(data)
    while left:
        left = left[opened.write(left) :]  # Linux writes at most 2 GB at once
    return len(data)


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
        found = _Sum(opened.read(tensors[0].start if tensors else nbytes))
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


def parse_header(part: Callable[[int, int], bytes], size: int) -> tuple[dict[str, str], dict[str, Entry]]:
    """The text and the tensors in the header of a file.

    Args:
        part: gives the bytes from one place to another.
        size: length of the file in bytes.

    Raises:
        ValueError, KeyError, TypeError: it is no such file, or cut short.
    """
    length = int.from_bytes(part(0, 8), "little")
    if size < 8 or length + 8 > size:
        raise ValueError(f"it has {size} bytes, which is less than its header")
    header = json.loads(part(8, 8 + length))
    about = header.pop("__metadata__", {})
    entries = {}
    for key, value in header.items():
        start, end = value["data_offsets"]
        if value["dtype"] not in DTYPES:
            raise ValueError(f"{key} is of the format {value['dtype']}, which is not known here")
        entry = Entry(DTYPES[value["dtype"]], tuple(value["shape"]), 8 + length + start)
        if entry.nbytes != end - start or 8 + length + end > size:
            raise ValueError(f"it has {size} bytes, and {key} should lie in bytes {entry.start} to {8 + length + end}")
        entries[key] = entry
    return about, entries


class TensorFile:
    """A safetensors file, open for reading.

    Attributes:
        entries: its tensors, by key.
        about: the text in its header.
        bytes_read: how much has been read of tensors.

    Raises:
        CheckpointError: naming the file, where it is missing, cut short or no such file.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.bytes_read = file, 0
        self.about: dict[str, str] = {}
        self._descriptor = -1
        try:
            self._descriptor = os.open(file, os.O_RDONLY)
            self.entries = self._read_header()
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.close()
            raise CheckpointError(f"{file} cannot be read: {_said(error)}") from error

    def _read_header(self) -> dict[str, Entry]:
        size = os.fstat(self._descriptor).st_size
        self.about, entries = parse_header(lambda start, stop: os.pread(self._descriptor, stop - start, start), size)
        return entries

    def read(self, key: str, start: Sequence[int], target: torch.Tensor) -> None:
        """Read a box of a tensor.

        Args:
            start: where the box begins in the tensor.
            target: of the box's extent; written in place, and cast to where its format is another.

        Raises:
            CheckpointError: naming the file.
        """
        if not target.numel():
            return
        if key not in self.entries:
            raise CheckpointError(f"{self.file} has no tensor {key}.")
        try:
            self._read(self.entries[key], tuple(start), target)
        except OSError as error:
            raise CheckpointError(f"{self.file} cannot be read: {_said(error)}") from error

    def _read(self, entry: Entry, start: tuple[int, ...], target: torch.Tensor) -> None:
        """Where the box is one run of bytes, at once; else in as few runs as it has, or a block of rows at a time."""
        shape, extent = entry.shape, tuple(target.shape)
        fixed = _leading(shape, extent)  # dims from here on are taken whole
        if fixed <= 1 or math.prod(extent[: fixed - 1]) == 1:
            offset = sum(s * math.prod(shape[dim + 1 :]) for dim, s in enumerate(start))
            self._read_run(entry, offset, target)
        elif fixed == len(shape) and extent[-1] * entry.dtype.itemsize >= 4096:
            for index in range(extent[0]):  # few and long parts of rows: each by itself
                self._read(Entry(entry.dtype, shape[1:], self._row(entry, start[0] + index)), start[1:], target[index])
        else:
            self._read_rows(entry, start, target)

    def _row(self, entry: Entry, index: int) -> int:
        return entry.start + index * math.prod(entry.shape[1:]) * entry.dtype.itemsize

    def _read_rows(self, entry: Entry, start: tuple[int, ...], target: torch.Tensor) -> None:
        """Whole rows of the first dim that the box touches, of which it is then cut out; a block of them at a time."""
        inner = (slice(None), *(slice(s, s + n) for s, n in zip(start[1:], target.shape[1:])))
        nbytes = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        rows = max(1, BLOCK // nbytes)
        for first in range(0, target.shape[0], rows):
            part = target[first : first + rows]
            if part.shape[0] == 1 and nbytes > BLOCK and part.dim() > 2:
                below = Entry(entry.dtype, entry.shape[1:], self._row(entry, start[0] + first))
                self._read(below, start[1:], part[0])
                continue
            block = torch.empty(part.shape[0], *entry.shape[1:], dtype=entry.dtype)
            self._read_run(entry, (start[0] + first) * math.prod(entry.shape[1:]), block)
            part.copy_(block[inner])

    def _read_run(self, entry: Entry, offset: int, target: torch.Tensor) -> None:
        """Entries from `offset` on, as many as the target has."""
        place = entry.start + offset * entry.dtype.itemsize
        if target.device.type == "cpu" and target.dtype == entry.dtype and target.is_contiguous():
            self._fill(target, place)
            return
        if target.dim() and target.shape[0] > 1 and target.numel() * entry.dtype.itemsize > BLOCK:
            row = target[0].numel()
            rows = max(1, BLOCK // (row * entry.dtype.itemsize))
            for first in range(0, target.shape[0], rows):
                self._read_run(entry, offset + first * row, target[first : first + rows])
            return
        block = torch.empty(target.shape, dtype=entry.dtype)
        self._fill(block, place)
        target.copy_(block)

    def _fill(self, target: torch.Tensor, place: int) -> None:
        left = _raw(target)
        self.bytes_read += len(left)
        while left:
            count = os.preadv(self._descriptor, [left], place)
            if not count:
                raise OSError(f"it ends {len(left)} bytes too early")
            left, place = left[count:], place + count

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _leading(shape: Sequence[int], extent: Sequence[int]) -> int:
    """Number of leading dims after which all are taken whole."""
    number = len(shape)
    while number and shape[number - 1] == extent[number - 1]:
        number -= 1
    return number


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"


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
        found = _said(error)
    if found != expected.digest:
        rows = [("expected", f"check sum {expected.digest}"), ("found", found)]
        raise CheckpointError(explain(f"{file} is damaged.", rows))
