"""Column- and row-parallel linear layers (Megatron-LM, Shoeybi et al. 2019, section 3).

Shapes: B sequences, S tokens, D input features, F output features; a small letter is this rank's share of the
dimension. Row follows column without traffic in between: y_BSD = (act(x_BSD @ w_fD.T)) @ w_Df.T, summed over the axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.regions import gather_from_region, reduce_from_region, split_to_region
from colonnade.model.layout import Range, shard_ranges
from colonnade.shardformer.layer.column_product import column_product
from colonnade.shardformer.layer.deferred import linear_product
from colonnade.shardformer.layer.partial import sum_shared_gradient
from colonnade.shardformer.layer.region import Region
from colonnade.shardformer.layer.sharding import adopt, gathered_order, ranges_of, shard_parameter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Heads = Sequence[int | None] | int | None  # number of heads in each part; see `shard_ranges`


class ColumnParallel:
    """What column-parallel layers share whatever way their weight lies: entry, gathering, description."""

    PIECES = 1  # fused parts in the output unless the caller says otherwise

    weight: nn.Parameter
    bias: Any  # a Parameter or None
    axis: Axis
    region: Region
    gather_output: bool
    inside: bool
    out_features: int
    _whole: int
    _pieces: int | Sequence[int]
    _units: int | None
    _heads: Heads

    def _set_columns(
        self,
        whole: int,
        axis: Axis,
        gather_output: bool,
        pieces: int | Sequence[int] | None,
        units: int | None,
        heads: Heads,
        inside: bool,
        region: Region | None,
    ) -> list[Range]:
        pieces = self.PIECES if pieces is None else pieces
        ranges = ranges_of(whole, axis, f"the output of {type(self).__name__}", pieces, units, heads)
        self.axis, self.region, self.gather_output = axis, region or Region(axis), gather_output
        self.inside = inside
        if not inside:
            self.region.join(self)
        self._whole, self._pieces, self._units, self._heads = whole, pieces, units, heads
        self.out_features = sum(r.size for r in ranges)
        return ranges

    def _cut(self, ranges: list[Range], weight_dim: int) -> None:
        """Cut weight and bias to this rank's columns, and complete the gradients of those that other ranks hold too."""
        for param, dim in ((self.weight, weight_dim), (self.bias, 0)):
            if param is not None:
                shard_parameter(param, dim, ranges, self.axis)
                sum_shared_gradient(param, self, self.axis, self._units)  # type: ignore[arg-type]  # it is a module

    def _held(self, rank: int) -> list[Range]:
        return shard_ranges(self._whole, rank, self.axis.size, self._pieces, self._units, self._heads)

    def _gathered(self, y_BSf: torch.Tensor) -> torch.Tensor:
        if not self.gather_output or self.axis.size == 1:
            return y_BSf
        held = [self._held(rank) for rank in range(self.axis.size)]
        self.region.leave()
        y_BSF = gather_from_region(y_BSf, self.axis, -1, [sum(r.size for r in ranges) for ranges in held])
        order = gathered_order(held)
        return y_BSF if order is None else y_BSF.index_select(-1, order.to(y_BSF.device))

    def _columns_repr(self) -> str:
        parts = self._pieces if isinstance(self._pieces, int) else len(self._pieces)
        fused = f", {parts} fused parts" if parts > 1 else ""
        return (
            f"{self.out_features} of {self._whole} columns on {self.axis.name} {self.axis.rank}/{self.axis.size}{fused}"
        )


class Linear1D_Col(ColumnParallel, nn.Linear):
    """Linear layer whose output features are split over the tensor-parallel axis.

    y_BSf = x_BSD @ w_fD.T + b_f

    Traffic: forward none; backward one all-reduce of dx_BSD per region (see `Region`), so layers that read the same
        input share one. With `gather_output` also an all-gather of y_BSF in the forward.
    Layout: weight dim 0, bias dim 0.

    Args:
        in_features, out_features: sizes of the whole layer.
        process_group: the tensor-parallel group or `Axis`; None for all ranks of the job.
        gather_output: return y_BSF on every rank.
        pieces: what is fused in the output dimension, each part split by itself: a number of equal parts, or sizes.
        units: number of blocks in each part: key/value heads with the query heads that read them.
        heads: number of heads in each part, for all parts or for each. Blocks stay whole while there are at least as
            many as ranks; where there are fewer they are cut into whole heads. A part for which None is given (keys and
            values) is not cut: several ranks hold the same block, and its gradient is summed over them.
        inside: its input is inside the region already, as that of a `LatentLinear` is; nothing is entered here.
        region: shared by layers that read the same input.
    """

    weight: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        process_group: Axis | ProcessGroup | None = None,
        gather_output: bool = False,
        pieces: int | Sequence[int] | None = None,
        units: int | None = None,
        heads: Heads = None,
        inside: bool = False,
        region: Region | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._shard(Axis.of(process_group), gather_output, pieces, units, heads, inside, region)

    @classmethod
    def from_native_module(
        cls,
        module: nn.Module,
        process_group: Axis | ProcessGroup | None = None,
        *,
        gather_output: bool = False,
        pieces: int | Sequence[int] | None = None,
        units: int | None = None,
        heads: Heads = None,
        inside: bool = False,
        region: Region | None = None,
    ) -> Linear1D_Col:
        """Take over an `nn.Linear`; its Parameter objects stay, cut to this rank's share. Arguments as above."""
        layer = adopt(module, cls, nn.Linear)
        layer._shard(Axis.of(process_group), gather_output, pieces, units, heads, inside, region)
        return layer

    def _shard(
        self,
        axis: Axis,
        gather_output: bool,
        pieces: int | Sequence[int] | None,
        units: int | None,
        heads: Heads,
        inside: bool,
        region: Region | None,
    ) -> None:
        self._cut(self._set_columns(self.out_features, axis, gather_output, pieces, units, heads, inside, region), 0)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return self._gathered(column_product(self, x_BSD))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, {self._columns_repr()}, bias={self.bias is not None}"


class RowParallel:
    """What row-parallel layers share whatever way their weight lies."""

    axis: Axis
    region: Region | None
    parallel_input: bool
    in_features: int
    bias: Any  # a Parameter or None
    _whole: int
    _sizes: list[int]
    _units: int | None
    _heads: int | None

    def _set_rows(
        self,
        whole: int,
        axis: Axis,
        parallel_input: bool,
        units: int | None,
        heads: int | None,
        region: Region | None,
    ) -> list[Range]:
        heads = heads or units  # no two ranks may add the same rows
        ranges = ranges_of(whole, axis, f"the input of {type(self).__name__}", 1, units, heads)
        self.axis, self.region, self.parallel_input, self._whole = axis, region, parallel_input, whole
        self._units, self._heads = units, heads
        self._sizes = [
            sum(r.size for r in shard_ranges(whole, rank, axis.size, 1, units, heads)) for rank in range(axis.size)
        ]
        self.in_features = self._sizes[axis.rank]
        return ranges

    def _local_input(self, x: torch.Tensor) -> torch.Tensor:
        if self.region is not None:
            self.region.leave()
        return x if self.parallel_input else split_to_region(x, self.axis, -1, self._sizes)

    def _summed(self, y_BSD: torch.Tensor) -> torch.Tensor:
        y_BSD = reduce_from_region(y_BSD, self.axis, in_place=True)
        return y_BSD if self.bias is None else y_BSD + self.bias  # once, after the sum

    def _rows_repr(self) -> str:
        return f"{self.in_features} of {self._whole} rows on {self.axis.name} {self.axis.rank}/{self.axis.size}"


class Linear1D_Row(RowParallel, nn.Linear):
    """Linear layer whose input features are split over the tensor-parallel axis.

    y_BSD = sum over ranks of x_BSf @ w_Df.T, + b_D

    Traffic: forward one all-reduce of y_BSD; backward none.
    Layout: weight dim 1; the bias is whole on every rank and added once.

    Args:
        in_features, out_features: sizes of the whole layer.
        process_group: the tensor-parallel group or `Axis`; None for all ranks of the job.
        parallel_input: the input is this rank's share already (as a column-parallel layer leaves it).
        units: number of blocks in the input dimension, and
        heads: of heads, into which blocks are cut where there are fewer than ranks; as for the columns before.
        region: the region that this layer closes.
    """

    weight: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        process_group: Axis | ProcessGroup | None = None,
        parallel_input: bool = True,
        units: int | None = None,
        heads: int | None = None,
        region: Region | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._shard(Axis.of(process_group), parallel_input, units, heads, region)

    @classmethod
    def from_native_module(
        cls,
        module: nn.Module,
        process_group: Axis | ProcessGroup | None = None,
        *,
        parallel_input: bool = True,
        units: int | None = None,
        heads: int | None = None,
        region: Region | None = None,
    ) -> Linear1D_Row:
        """Take over an `nn.Linear`; its Parameter objects stay, cut to this rank's share. Arguments as above."""
        layer = adopt(module, cls, nn.Linear)
        layer._shard(Axis.of(process_group), parallel_input, units, heads, region)
        return layer

    def _shard(
        self, axis: Axis, parallel_input: bool, units: int | None, heads: int | None, region: Region | None
    ) -> None:
        ranges = self._set_rows(self.in_features, axis, parallel_input, units, heads, region)
        shard_parameter(self.weight, 1, ranges, axis)

    def forward(self, x_BSf: torch.Tensor) -> torch.Tensor:
        return self._summed(linear_product(self._local_input(x_BSf), self.weight))

    def extra_repr(self) -> str:
        return f"{self._rows_repr()}, out_features={self.out_features}, bias={self.bias is not None}"
