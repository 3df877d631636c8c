"""Gradients of which each rank's backward pass yields a share: completed by a sum, on the parameter itself.

The sum is taken by a hook on the leaf, before the gradient is accumulated, so it holds under gradient accumulation
and with or without a plugin. The hook is set at the first forward in which the parameter trains, so a parameter may be
frozen now and thawed later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_reduce
from colonnade.model.layout import Box, TensorLayout, deal, layout_of, set_layout


def sum_gradient(param: nn.Parameter, axis: Axis, *modules: nn.Module) -> None:
    """For a parameter that every rank holds whole and uses inside a region.

    Args:
        modules: of which at least one is called whenever the parameter is used.

    Traffic: one all-reduce of its gradient for each backward pass.
    """
    if axis.size == 1:
        return
    set_layout(param, TensorLayout.whole(param.shape, partial_axes=(axis.name,)))
    _complete(
        param, modules, lambda grad: all_reduce(grad.clone(memory_format=torch.contiguous_format), axis), param.numel()
    )


def sum_shared_gradient(param: nn.Parameter, module: nn.Module, axis: Axis, units: int | None) -> None:
    """For a parameter of which several ranks hold the same piece; see [Note: fewer blocks than ranks].

    Args:
        units: number of blocks in each of its parts.

    Traffic: one all-reduce for each backward pass, of as many entries as all the shared blocks have.
    """
    if units is None or units >= axis.size:
        return
    mine = next(block for block, (first, last) in enumerate(deal(axis.size, units)) if first <= axis.rank < last)
    shared = [box for box in layout_of(param).boxes if box.holders]
    if shared:
        elements = units * sum(math.prod(box.extent) for box in shared)
        _complete(param, (module,), lambda grad: _summed_by_block(grad, shared, mine, units, axis), elements)


def summed_elements(param: torch.Tensor) -> int:
    """Elements of the all-reduce that completes a parameter's gradient in each backward pass; 0 where there is none."""
    return getattr(param, "summed_elements", 0)


def _summed_by_block(grad: torch.Tensor, boxes: list[Box], mine: int, units: int, axis: Axis) -> torch.Tensor:
    parts = [grad[box.local_slices] for box in boxes]
    slots = grad.new_zeros((units, sum(part.numel() for part in parts)))
    slots[mine] = torch.cat([part.reshape(-1) for part in parts])
    all_reduce(slots, axis)
    summed = grad.clone(memory_format=torch.contiguous_format)
    for box, flat in zip(boxes, slots[mine].split([part.numel() for part in parts])):
        summed[box.local_slices] = flat.view(box.extent)
    return summed


def _complete(
    param: nn.Parameter, modules: Iterable[nn.Module], summed: Callable[[torch.Tensor], torch.Tensor], elements: int
) -> None:
    param.summed_elements = elements  # type: ignore[attr-defined]

    def ensure(*_: Any) -> None:
        if param.requires_grad and not getattr(param, "is_summed", False):  # one sum, however many layers share it
            param.is_summed = True  # type: ignore[attr-defined]
            param.register_hook(summed)

    for module in modules:
        module.register_forward_pre_hook(ensure)
