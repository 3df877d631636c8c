"""Conjugate pairs of collectives: the backward of each is another one of them.

A *region* is the stretch of a model between column-parallel and row-parallel layers, in which ranks work on
different features. Where it is entered and left, forward and backward exchange roles
(the functions f and g of Megatron-LM, Shoeybi et al. 2019, section 3):

    function             forward       backward
    copy_to_region       identity      all-reduce
    reduce_from_region   all-reduce    identity
    gather_from_region   all-gather    own slice
    split_to_region      own slice     all-gather
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_dim, all_reduce


class _CopyToRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # autograd may hand the same gradient to another branch, so the sum goes into a copy
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _ReduceFromRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, in_place: bool) -> torch.Tensor:
        if in_place and x.is_contiguous():
            ctx.mark_dirty(x)
            return all_reduce(x, axis)
        return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class _GatherFromRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return all_gather_dim(x, axis, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return grad.split(ctx.sizes, ctx.dim)[ctx.axis.rank].contiguous(), None, None, None


class _SplitToRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return x.split(sizes, dim)[axis.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return all_gather_dim(grad, ctx.axis, ctx.dim, ctx.sizes), None, None, None


def copy_to_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Enter a region with a tensor that all ranks hold whole. Traffic: backward one all-reduce of x.numel()."""
    if axis.size == 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _CopyToRegion.apply(x, axis)


def reduce_from_region(x: torch.Tensor, axis: Axis, in_place: bool = False) -> torch.Tensor:
    """Leave a region by summing the ranks' shares. Traffic: forward one all-reduce of x.numel().

    Args:
        in_place: sum into `x` itself; only for a fresh tensor whose producer does not need it in its backward.
    """
    return x if axis.size == 1 else _ReduceFromRegion.apply(x, axis, in_place)


def gather_from_region(x: torch.Tensor, axis: Axis, dim: int, sizes: list[int]) -> torch.Tensor:
    """Leave a region by joining the ranks' slices along `dim`, whose extents are `sizes`.

    What follows must be computed alike on all ranks: the backward takes this rank's slice of the gradient.
    """
    return x if axis.size == 1 else _GatherFromRegion.apply(x, axis, dim, sizes)


def split_to_region(x: torch.Tensor, axis: Axis, dim: int, sizes: list[int]) -> torch.Tensor:
    """Enter a region with this rank's slice along `dim` of a tensor that all ranks hold whole."""
    return x if axis.size == 1 else _SplitToRegion.apply(x, axis, dim, sizes)
