"""The product of a layer that enters a region, its two gradients made apart; see [Note: reducing behind the weight gradients]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from colonnade.cluster.mesh import Axis
from colonnade.comm.regions import copy_to_region
from colonnade.shardformer.layer.deferred import Product, linear_product, product
from colonnade.shardformer.layer.region import Region


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
    leave = None if tap is None else tap.pending.append
    return Product.apply(change(entry.x), weight, layer.bias, leave, transposed)
