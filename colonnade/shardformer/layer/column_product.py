"""The product of a layer that enters a region, its two gradients made apart; see [Note: reducing behind the weight gradients]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from colonnade.cluster.mesh import Axis
from colonnade.comm.regions import copy_to_region
from colonnade.shardformer.layer.deferred import linear_product, product
from colonnade.shardformer.layer.region import Region, Tap


class Reader(Protocol):
    """A layer that multiplies a region's input by its weight.

    Attributes:
        inside: its input is inside the region already.
    """

    weight: torch.nn.Parameter
    bias: Any
    axis: Axis
    region: Region
    inside: bool


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tap: Tap | None, transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tap, ctx.transposed = tap, transposed
        return product(x, weight, bias, transposed)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        rows_x, rows_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx = dy @ (weight.t() if ctx.transposed else weight)
        dw = db = None
        if ctx.tap is not None:
            left, right = (rows_x, rows_dy) if ctx.transposed else (rows_dy, rows_x)
            ctx.tap.pending.append(lambda: left.t() @ right)
            dw = weight.new_zeros(()).expand_as(weight)  # only tells autograd that the tap's turn has come
        if ctx.needs_input_grad[2]:
            db = rows_dy.sum(0)
        return dx, dw, db, None, None


def column_product(
    layer: Reader,
    x: torch.Tensor,
    transposed: bool = False,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> torch.Tensor:
    """What a column-parallel layer computes: enter its region, multiply.

    Args:
        x: [..., in], whole on every rank; its gradient comes out whole unless the layer is inside a region.
        transposed: the weight is [in, out] instead of [out, in].
        change: done to x between entering and multiplying; the same on all ranks.

    Returns:
        [..., this rank's share of out].
    """
    if layer.inside:
        return linear_product(change(x), layer.weight, layer.bias, transposed)
    if torch.is_autocast_enabled(x.device.type):  # which casts inside of torch's own operators only
        return product(change(copy_to_region(x, layer.axis)), layer.weight, layer.bias, transposed)
    entry = layer.region.enter(x)
    if layer not in entry.weights:
        return linear_product(change(entry.x), layer.weight, layer.bias, transposed)
    weight, tap = entry.weights[layer]
    return _Product.apply(change(entry.x), weight, layer.bias, tap, transposed)
