"""Pieces: what a rank holds of a logical tensor, as boxes of it and the memory in which each lies.

A `TensorLayout` says where a local tensor lies in the logical one; pieces are its boxes together with views of the memory,
which is all that writing a checkpoint and reading one have to know. A part of a local tensor that begins and ends anywhere,
as ZeRO deals parameters out, is a few boxes too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from colonnade.model.layout import Box, TensorLayout


class Piece(NamedTuple):
    """A box of a logical tensor.

    Args:
        offset: where it begins in the logical tensor.
        tensor: its entries; of the extent of the box, and a view of the memory in which this rank holds them.
    """

    offset: tuple[int, ...]
    tensor: torch.Tensor


def pieces_of(local: torch.Tensor, layout: TensorLayout, position: int | None = None) -> list[Piece]:
    """The boxes of a local tensor; empty ones are left out.

    Args:
        local: at least as large as its layout says.
        position: this rank's on the axis that has `holders`; boxes of which it is not the first holder are left out.
    """
    return [
        Piece(box.logical, local[box.local_slices])
        for box in layout.boxes
        if math.prod(box.extent) and (position is None or not box.holders or box.holders[0] == position)
    ]


def pieces_of_range(
    flat: torch.Tensor, layout: TensorLayout, start: int, stop: int, position: int | None = None
) -> list[Piece]:
    """The boxes of a part of a local tensor.

    Args:
        flat: [stop - start], entries `start` to `stop` of the local tensor in row-major order.
        layout: of the local tensor, which has exactly the shape that the layout says.
        position: as in `pieces_of`.
    """
    shape = layout.local_shape
    found: list[Piece] = []
    for corner, extent in rectangles(shape, start, stop):
        offset = sum(c * math.prod(shape[dim + 1 :]) for dim, c in enumerate(corner)) - start
        part = flat[offset : offset + math.prod(extent)].view(extent)
        for box in layout.boxes:
            if position is not None and box.holders and box.holders[0] != position:
                continue
            found += _overlap(part, corner, extent, box)
    return found


def _overlap(part: torch.Tensor, corner: Sequence[int], extent: Sequence[int], box: Box) -> Iterator[Piece]:
    """What of a rectangle of the local tensor lies in a box."""
    first = [max(a, b) for a, b in zip(corner, box.local)]
    last = [min(a + n, b + m) for a, n, b, m in zip(corner, extent, box.local, box.extent)]
    if all(a < b for a, b in zip(first, last)):
        here = tuple(slice(a - c, b - c) for a, b, c in zip(first, last, corner))
        yield Piece(tuple(a - c + g for a, c, g in zip(first, box.local, box.logical)), part[here])


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The run of entries from `start` to `stop` of a tensor, in row-major order, as (corner, extent) of rectangles.

    At most 2 · dims - 1 of them: what is left of a row, whole rows, and what is begun of a row, for each dim.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # all within one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(
    shape: tuple[int, ...], number: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for corner, extent in rectangles(shape[1:], start, stop):
        yield (number, *corner), (1, *extent)
