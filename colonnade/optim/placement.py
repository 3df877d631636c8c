"""Placement: where this rank's entries of a logical tensor lie, and what it has to count in sums over all of it.

[Note: held coordinates]
A rank holds some of the rows of a logical matrix and some of its columns (and of the leading dims, where there are more
than two). Statistics by row or by column are kept for what it holds alone, in the order of the logical tensor. That
numbering is called held: held row 3 is the fourth logical row that this rank has anything of. For a column shard, a row
shard and a fused [q|k|v] shard the local tensor is the whole rectangle of held rows × held columns, and is computed on at
once; for any other layout each box is computed on by itself.

[Note: counted once]
A box that several ranks hold is counted on the first of them in sums over ranks. All ranks know the layouts of all, so
this needs no bookkeeping, and no collective is issued that a rank without boxes would not expect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod

import torch

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather, all_reduce
from colonnade.model.layout import Box, TensorLayout

Runs = list[tuple[int, int]]  # disjoint ranges of logical indexes, in order


@dataclass(frozen=True)
class Part:
    """A rectangle of the local tensor that is a rectangle in held coordinates too.

    Args:
        local: where it lies in the local tensor.
        held: where it lies in held coordinates.
        counted: whether this rank counts it in sums over ranks; see [Note: counted once].
    """

    local: tuple[slice, ...]
    held: tuple[slice, ...]
    counted: bool

    def without(self, *dims: int) -> tuple[slice, ...]:
        """Where it lies in a statistic that has extent 1 along `dims` (negative numbers)."""
        reduced = {dim % len(self.held) for dim in dims}
        return tuple(slice(None) if dim in reduced else s for dim, s in enumerate(self.held))


@dataclass(frozen=True)
class Partial:
    """This rank's share of a sum.

    Args:
        value: the share.
        axes: over which shares are to be added; empty where the share is the sum.
        layout: what of the sum this rank keeps; None for all of it.
    """

    value: torch.Tensor
    axes: tuple[Axis, ...] = ()
    layout: TensorLayout | None = None


class Placement:
    """Where the entries of all ranks lie in a logical tensor, as one rank sees it.

    Args:
        layouts: of all ranks that hold different boxes.
        position: which of them is this rank's.
        axes: the mesh axes along which they hold different boxes; the first varies fastest in `layouts`.

    Attributes:
        layout: of this rank.
        shape: shape of the logical tensor.
        numel: number of its entries.
        split: by dim, whether some rank holds only a part of it, so that a sum along it goes over ranks.
        parts: this rank's rectangles.
    """

    def __init__(self, layouts: Sequence[TensorLayout], position: int, axes: tuple[Axis, ...]) -> None:
        self.layouts, self.axes = list(layouts), axes
        layout = self.layouts[position]
        self.layout, self.shape, self.numel = layout, layout.shape, prod(layout.shape)
        self.split = tuple(
            any(box.extent[dim] != size for each in self.layouts for box in each.boxes)
            for dim, size in enumerate(self.shape)
        )
        self.held = [_held(layout, dim) for dim in range(len(self.shape))]
        if len(self.shape) > 1 and self.split[-1] and self.split[-2]:
            # one of the two statistics is kept whole: from it every rank knows the mean over both dims
            self.held[-1] = [(0, self.shape[-1])]
        self.parts = self._parts(layout, {_place(box) for each in self.layouts[:position] for box in each.boxes})
        self.statistic = cache(self._statistic)

    def _parts(self, layout: TensorLayout, counted_before: set[tuple]) -> list[Part]:
        boxes = [box for box in layout.boxes if prod(box.extent)]
        counted = [_place(box) not in counted_before for box in boxes]
        held_shape = tuple(_length(runs) for runs in self.held)
        if boxes and len(set(counted)) == 1 and _is_grid(layout) and held_shape == layout.local_shape:
            everything = tuple(slice(0, n) for n in held_shape)
            return [Part(everything, everything, counted[0])]
        return [Part(box.local_slices, _slices(box, self.held), mine) for box, mine in zip(boxes, counted)]

    def _statistic(self, *dims: int) -> TensorLayout:
        """The layout of what this rank keeps of a statistic reduced over `dims` (negative numbers), which stay as 1."""
        reduced = {dim % len(self.shape) for dim in dims}
        shape = tuple(1 if dim in reduced else n for dim, n in enumerate(self.shape))
        runs: list[list[tuple[int, int, int]]] = []
        for dim, held in enumerate(self.held):
            offset, of_dim = 0, []
            for start, stop in [(0, 1)] if dim in reduced else held or [(0, 0)]:
                of_dim.append((start, offset, stop - start))
                offset += stop - start
            runs.append(of_dim)
        boxes = [Box(*zip(*corner)) if corner else Box((), (), ()) for corner in product(*runs)]
        return TensorLayout(shape, tuple(boxes), tuple(axis.name for axis in self.axes))

    def zeros(self, *dims: int, like: torch.Tensor) -> torch.Tensor:
        """An empty statistic reduced over `dims`, in held coordinates."""
        return like.new_zeros(self.statistic(*dims).local_shape)

    def square(self, tensor: torch.Tensor) -> Partial:
        """The sum of the squares of all entries of the logical tensor, a scalar; one number is communicated."""
        norms = [torch.linalg.vector_norm(tensor[part.local]) for part in self.parts if part.counted or not self.axes]
        value = torch.stack(norms).square().sum() if norms else tensor.new_zeros(())
        return Partial(value, self.axes)

    def square_along(self, tensor: torch.Tensor, dim: int) -> Partial:
        """The sums of squares along `dim`, which stays as 1, for what this rank holds of the other dims.

        Traffic: where `dim` is split, one number for each entry of the logical statistic.
        """

        def squares(part: Part) -> torch.Tensor:
            return torch.linalg.vector_norm(tensor[part.local], dim=dim, keepdim=True).square_()

        return self.sum_along(dim, squares, lambda: self.zeros(dim, like=tensor))

    def sum_along(
        self, dim: int, term: Callable[[Part], torch.Tensor], zeros: Callable[[], torch.Tensor], width: int = 1
    ) -> Partial:
        """What remains of the logical tensor where `dim` is contracted.

        Args:
            dim: negative number.
            term: what a part gives; `width` along `dim`.
            zeros: makes a tensor in held coordinates with `width` along `dim`.
        """
        over_ranks = bool(self.axes) and self.split[dim]
        parts = [part for part in self.parts if part.counted or not over_ranks]
        if len(parts) == len(self.parts) == 1 and parts[0].held == tuple(slice(0, _length(r)) for r in self.held):
            total = term(parts[0])
        else:
            total = zeros()
            for part in parts:
                total[part.without(dim)] += term(part)
        if not over_ranks:
            return Partial(total)
        layout = widened(self.statistic(dim), dim, width)
        return Partial(layout.insert(total, total.new_zeros(layout.shape)), self.axes, layout)

    def mean(self, by_row: torch.Tensor, by_column: torch.Tensor) -> torch.Tensor:
        """The mean over the last two dims of the logical tensor, of which the means by row and by column are held."""
        if self.split[-2]:
            return by_column.mean(-1, keepdim=True)
        return by_row.mean(-2, keepdim=True)

    def assemble(self, like: torch.Tensor, term: Callable[[Part], torch.Tensor]) -> torch.Tensor:
        """A local tensor from what is computed for each part."""
        if len(self.parts) == 1 and self.parts[0].local == tuple(slice(0, n) for n in like.shape):
            return term(self.parts[0])
        result = torch.empty_like(like)
        for part in self.parts:
            result[part.local] = term(part)
        return result

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The logical tensor, on every rank.

        Traffic: an all-gather over each axis, of the largest local tensor for each rank.
        """
        if not self.axes:
            return local
        sizes = [prod(layout.local_shape) for layout in self.layouts]
        flat = local.new_zeros(1, max(sizes))
        flat[0, : local.numel()] = local.reshape(-1)
        for axis in self.axes:
            flat = torch.cat(all_gather(flat, axis))
        logical = local.new_empty(self.shape)
        for layout, size, piece in zip(self.layouts, sizes, flat):
            layout.insert(piece[:size].view(layout.local_shape), logical)
        return logical


def add_up(partials: Sequence[Partial]) -> list[torch.Tensor]:
    """Complete sums over ranks, in the order given.

    Traffic: one all-reduce over each axis, of all the shares together.
    """
    values = [partial.value for partial in partials]
    axes = {axis.name: axis for partial in partials for axis in partial.axes}
    for name in sorted(axes):
        shared = [i for i, partial in enumerate(partials) if axes[name] in partial.axes]
        flat = all_reduce(torch.cat([values[i].reshape(-1) for i in shared]), axes[name])
        for i, piece in zip(shared, flat.split([values[i].numel() for i in shared])):
            values[i] = piece.view(values[i].shape)
    return [v if p.layout is None else p.layout.extract(v) for v, p in zip(values, partials)]


def fit(tensor: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    """This rank's part of a state tensor that was computed before the parameter was split; others as they are."""
    if tensor.shape == layout.shape != layout.local_shape:
        return layout.extract(tensor)
    return tensor


def widened(layout: TensorLayout, dim: int, width: int) -> TensorLayout:
    """The layout of a statistic that has `width` entries along a dim in which `layout` has 1."""

    def at(corner: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(width if d == dim % len(corner) else n for d, n in enumerate(corner))

    boxes = tuple(Box(box.logical, box.local, at(box.extent)) for box in layout.boxes)
    return TensorLayout(at(layout.shape), boxes, layout.sharded_axes)


def _place(box: Box) -> tuple:
    return box.logical, box.extent


def _length(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


def _held(layout: TensorLayout, dim: int) -> Runs:
    """The logical indexes along a dim of which a rank holds anything."""
    runs: Runs = []
    for start, stop in sorted({(b.logical[dim], b.logical[dim] + b.extent[dim]) for b in layout.boxes}):
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
        elif stop > start:
            runs.append((start, stop))
    return runs


def _slices(box: Box, held: Sequence[Runs]) -> tuple[slice, ...]:
    """Where a box lies in held coordinates."""
    found = []
    for start, extent, runs in zip(box.logical, box.extent, held):
        before = sum(max(0, min(stop, start) - first) for first, stop in runs)
        found.append(slice(before, before + extent))
    return tuple(found)


def _is_grid(layout: TensorLayout) -> bool:
    """Whether the local tensor is the whole rectangle of held rows × held columns, in their order."""
    held = [_held(layout, dim) for dim in range(len(layout.shape))]
    boxes = [box for box in layout.boxes if prod(box.extent)]
    if sum(prod(box.extent) for box in boxes) != prod(_length(runs) for runs in held):
        return False
    return all(_slices(box, held) == box.local_slices for box in boxes)
