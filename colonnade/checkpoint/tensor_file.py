"""Files of tensors in safetensors format, written from where the tensors lie and read to where they belong.

[Note: no copies]
The format is a header that says where each tensor is, and then their bytes. A contiguous tensor is handed to the operating
system as it lies in memory, and what is asked for is read into the memory that it is for: a save needs no memory, a load
none beside its targets, and nothing of a file stays mapped. Any safetensors reader reads these files.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from colonnade.checkpoint.file_sum import FileSum, TensorSum
from colonnade.checkpoint.tensor_header import KINDS, Entry, parse_header, said
from colonnade.errors import CheckpointError

BLOCK = 16 << 20  # bytes that are read at once where they cannot go to their place directly
ALIGNMENT = 64  # of the first tensor


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
        synced, found = _Synced(opened.fileno()), TensorSum(header)
        try:
            for key in order:
                found.add(_bytes_of(tensors[key]))
            meanwhile()
        finally:
            synced.wait()
    return FileSum(nbytes, found.digest)


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
            raise CheckpointError(f"{file} cannot be read: {said(error)}") from error

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
            raise CheckpointError(f"{self.file} cannot be read: {said(error)}") from error

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
