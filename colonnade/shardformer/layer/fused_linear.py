"""Fused projections ([q|k|v], [gate|up]), and the transposed linear layer that GPT-2 calls Conv1D.

A fused weight cut in equal slices would give rank 0 all of q and half of k; shapes would still fit. Each fused part
is split by itself. A Conv1D keeps its weight as w_DF, the transpose of nn.Linear's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.errors import PolicyError
from colonnade.shardformer.layer.column_product import column_product
from colonnade.shardformer.layer.deferred import linear_product
from colonnade.shardformer.layer.linear import ColumnParallel, Heads, Linear1D_Col, RowParallel
from colonnade.shardformer.layer.region import Region
from colonnade.shardformer.layer.sharding import Layer, shard_parameter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class FusedLinear1D_Col(Linear1D_Col):
    """Column-parallel linear layer with fused parts in its output, three equal ones by default ([q|k|v]).

    The same as `Linear1D_Col(pieces=...)`, which says what the arguments mean.
    """

    PIECES = 3


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, known by its name and parts so that nothing has to be imported."""
    return (
        any(c.__name__ == "Conv1D" for c in type(module).__mro__)
        and hasattr(module, "nf")
        and hasattr(module, "weight")
    )


def _adopt_conv1d(module: nn.Module, cls: type[Layer]) -> Layer:
    if not is_conv1d(module):
        raise PolicyError(f"{cls.__name__} replaces a Conv1D, and was given a {type(module).__name__}.")
    layer = cls.__new__(cls)
    layer.__dict__.update(module.__dict__)
    return layer


class Conv1D_Col(ColumnParallel, nn.Module):
    """Column-parallel form of transformers' Conv1D: y_BSf = x_BSD @ w_Df + b_f.

    Traffic as `Linear1D_Col`. Layout: weight dim 1, bias dim 0.
    """

    weight: nn.Parameter
    bias: nn.Parameter
    nf: int

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
    ) -> Conv1D_Col:
        """Take over a Conv1D; arguments as `Linear1D_Col`."""
        layer = _adopt_conv1d(module, cls)
        width, axis = layer.weight.shape[1], Axis.of(process_group)
        layer._cut(layer._set_columns(width, axis, gather_output, pieces, units, heads, inside, region), 1)
        layer.nf = layer.out_features
        return layer

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return self._gathered(column_product(self, x_BSD, transposed=True))

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[0]}, {self._columns_repr()}"


class FusedLinearConv1D_Col(Conv1D_Col):
    """Column-parallel Conv1D with fused parts, three equal ones by default (GPT-2's c_attn)."""

    PIECES = 3


class Conv1D_Row(RowParallel, nn.Module):
    """Row-parallel form of transformers' Conv1D: y_BSD = sum over ranks of x_BSf @ w_fD, + b_D.

    Traffic as `Linear1D_Row`. Layout: weight dim 0; the bias is whole on every rank and added once.
    """

    weight: nn.Parameter
    bias: nn.Parameter

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
    ) -> Conv1D_Row:
        """Take over a Conv1D; arguments as `Linear1D_Row`."""
        layer = _adopt_conv1d(module, cls)
        ranges = layer._set_rows(layer.weight.shape[0], Axis.of(process_group), parallel_input, units, heads, region)
        shard_parameter(layer.weight, 0, ranges, layer.axis)
        return layer

    def forward(self, x_BSf: torch.Tensor) -> torch.Tensor:
        return self._summed(linear_product(self._local_input(x_BSf), self.weight, transposed=True))

    def extra_repr(self) -> str:
        return f"{self._rows_repr()}, out_features={self.weight.shape[1]}"
