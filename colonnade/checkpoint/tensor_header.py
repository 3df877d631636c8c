"""The header of a safetensors file: which tensors it has, of which formats and shapes, and where."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

SUFFIX = ".safetensors"
KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its format, its shape, and where its bytes begin in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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


def said(error: BaseException) -> str:
    """An error that came up in reading a file, in words."""
    return str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
