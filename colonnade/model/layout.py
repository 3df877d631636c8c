"""TensorLayout: which part of a logical tensor a rank's local tensor is.

[Note: boxes]
A local tensor is a set of boxes of a logical tensor. A column shard is one box; a fused [q|k|v] weight is three; a
vocabulary shard is one box of uneven height; a replicated parameter is one box as large as the tensor. The gradient norm,
the checkpoint and the parity check read boxes, and know nothing of models, of tensor parallelism or of plugins.
Splitting a tensor by the layouts of all ranks and merging the pieces is the identity.

[Note: fewer blocks than ranks]
A model with 2 key/value heads on 4 ranks has each of them on two ranks, and the query heads that read it are dealt out
over those two. Such a box has holders. Each holder's backward pass yields a share of its gradient, so the shares are
summed over the holders; the norm counts it on its first holder alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Box:
    """A rectangular piece, at `logical` in the logical tensor and at `local` in the local one.

    Args:
        holders: the ranks of the sharded axis that hold this piece, where there are fewer such pieces than ranks; empty
            where pieces are cut as finely as ranks need it.
    """

    logical: tuple[int, ...]
    local: tuple[int, ...]
    extent: tuple[int, ...]
    holders: tuple[int, ...] = ()

    @property
    def logical_slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + n) for start, n in zip(self.logical, self.extent))

    @property
    def local_slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + n) for start, n in zip(self.local, self.extent))


class Range(NamedTuple):
    """What a rank holds of a dimension, and which ranks hold the same; `holders` as in `Box`."""

    start: int
    stop: int
    holders: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class TensorLayout:
    """How this rank's tensor lies in the logical tensor.

    Args:
        shape: shape of the logical tensor, the one in the model's own state dict.
        boxes: the pieces this rank holds.
        sharded_axes: mesh axes along which ranks hold different boxes; along all others they hold the same.
        partial_axes: mesh axes along which each rank's backward pass yields only a share of the gradient.
        names: the model's own state-dict keys for it; several where weights are tied.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    sharded_axes: tuple[str, ...] = ()
    partial_axes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @staticmethod
    def whole(shape: Sequence[int], partial_axes: tuple[str, ...] = ()) -> TensorLayout:
        """The layout of a tensor that every rank holds entirely."""
        shape = tuple(shape)
        origin = (0,) * len(shape)
        return TensorLayout(shape, (Box(origin, origin, shape),), (), partial_axes)

    @staticmethod
    def split(shape: Sequence[int], dim: int, ranges: Iterable[Range], axis: str) -> TensorLayout:
        """The layout of a tensor cut along `dim`.

        Args:
            ranges: what this rank holds along `dim`, in the order in which it lies locally.
            axis: the mesh axis along which the other pieces are found.
        """
        shape, dim = tuple(shape), dim % len(shape)
        boxes, offset = [], 0
        for start, stop, holders in ranges:
            logical, local, extent = [0] * len(shape), [0] * len(shape), list(shape)
            logical[dim], local[dim], extent[dim] = start, offset, stop - start
            boxes.append(Box(tuple(logical), tuple(local), tuple(extent), holders))
            offset += stop - start
        return TensorLayout(shape, tuple(boxes), (axis,))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor."""
        corners = [[start + n for start, n in zip(box.local, box.extent)] for box in self.boxes]
        return tuple(max(ends) for ends in zip(*corners)) if corners else (0,) * len(self.shape)

    def named(self, *names: str) -> TensorLayout:
        """The same layout under the given state-dict keys."""
        return replace(self, names=names)

    def extract(self, logical: torch.Tensor) -> torch.Tensor:
        """Cut this rank's tensor out of the logical one; always a fresh contiguous tensor."""
        local = logical.new_empty(self.local_shape)
        for box in self.boxes:
            local[box.local_slices] = logical[box.logical_slices]
        return local

    def insert(self, local: torch.Tensor, logical: torch.Tensor) -> torch.Tensor:
        """Write this rank's tensor to its place in the logical one, and return the latter."""
        for box in self.boxes:
            logical[box.logical_slices] = local[box.local_slices]
        return logical


def merge(pieces: Iterable[tuple[torch.Tensor, TensorLayout]]) -> torch.Tensor:
    """Put the logical tensor together from the local tensors of all ranks that hold different boxes."""
    pieces = list(pieces)
    local, layout = pieces[0]
    logical = local.new_empty(layout.shape)
    for local, layout in pieces:
        layout.insert(local, logical)
    return logical


def deal(units: int, ranks: int) -> list[tuple[int, int]]:
    """Deal `units` indivisible blocks out to ranks in order: (start, stop) of each; the first ranks get one more."""
    base, extra = divmod(units, ranks)
    starts = [rank * base + min(rank, extra) for rank in range(ranks + 1)]
    return list(zip(starts, starts[1:]))


def deal_blocks(blocks: int, ranks: int, parts: int = 1) -> list[Range]:
    """Deal out blocks to ranks, counted in parts of a block; see [Note: fewer blocks than ranks].

    Where there are at least as many blocks as ranks, blocks stay whole. Where there are fewer, ranks are dealt to blocks,
    and each rank gets some of its block's parts; a block of one part is held by all its ranks.

    Args:
        parts: into how many pieces a block may be cut.
    """
    if blocks >= ranks:
        return [Range(start * parts, stop * parts) for start, stop in deal(blocks, ranks)]
    found: list[Range] = []
    for block, (first, last) in enumerate(deal(ranks, blocks)):
        if parts == 1:
            found += [Range(block, block + 1, tuple(range(first, last)))] * (last - first)
        else:
            found += [Range(block * parts + start, block * parts + stop) for start, stop in deal(parts, last - first)]
    return found


def shard_ranges(
    length: int,
    rank: int,
    ranks: int,
    pieces: Sequence[int] | int = 1,
    units: int | None = None,
    heads: Sequence[int | None] | int | None = None,
) -> list[Range]:
    """What one rank holds of a dimension.

    Args:
        length: extent of the dimension in the logical tensor.
        pieces: what is fused in it, each part of which is dealt out by itself: a number of equal parts or their sizes.
        units: number of equal blocks (key/value heads, with the query heads that read them) in each part; by default
            single entries. A block is cut only where there are fewer than ranks.
        heads: number of heads in each part, for all parts or for each: whole heads are what a block may be cut into;
            None for blocks that are never cut but held by several ranks.
    """
    sizes = [length // pieces] * pieces if isinstance(pieces, int) else list(pieces)
    if sum(sizes) != length:
        raise ValueError(f"a dimension of {length} is not made of parts {sizes}")
    counts = list(heads) if isinstance(heads, Sequence) else [heads] * len(sizes)
    if len(counts) != len(sizes):
        raise ValueError(f"counts of heads {counts} for parts {sizes}")
    ranges, offset = [], 0
    for size, count in zip(sizes, counts):
        blocks = units or size
        fine = count if count is not None and units is not None else blocks
        if size % fine or fine % blocks:
            raise ValueError(f"a part of {size} entries does not consist of {blocks} equal blocks of whole heads")
        start, stop, holders = deal_blocks(blocks, ranks, fine // blocks)[rank]
        ranges.append(Range(offset + start * (size // fine), offset + stop * (size // fine), holders))
        offset += size
    return ranges


def layout_of(tensor: torch.Tensor) -> TensorLayout:
    """The layout that rides on a parameter or buffer; whole where nothing has been said."""
    layout = getattr(tensor, "tensor_layout", None)
    return layout if layout is not None else TensorLayout.whole(tensor.shape)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the tensor itself, or the local part of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def has_layout(tensor: torch.Tensor) -> bool:
    """Whether a layout has been set on the tensor."""
    return getattr(tensor, "tensor_layout", None) is not None


def set_layout(tensor: torch.Tensor, layout: TensorLayout) -> None:
    """Let a layout ride on a tensor. (The name `layout` itself is taken by torch: strided or sparse.)"""
    tensor.tensor_layout = layout  # type: ignore[attr-defined]
