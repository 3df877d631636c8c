"""Region: the stretch between column-parallel and row-parallel layers, entered once however many layers open it.

[Note: entering once]
q, k and v (or gate and up) read one tensor. If each of them were its own entry, each would all-reduce its own
input gradient; entered once, the three gradients are added first and reduced together. The layers of a region share
one Region object: the first to be called with a tensor enters, the others with the same tensor get what it got. No
forward of the model has to change for it, and a layer that reads another tensor (cross attention) enters by itself.

[Note: reducing behind the weight gradients]
In the backward the input gradient of the region is needed by all ranks, its weight gradients by this one alone. So the
input gradients come first, their all-reduce is started, the weight gradients are computed while it runs, and only then
is it waited for. Nothing of that is scheduled by hand: autograd runs nodes in the reverse order of their making, and
entering makes them in the order

    wait · one tap for each weight · start the all-reduce · (the layers' products, when they are called)

A product's backward yields the input gradient and leaves at the weight's tap what the weight gradient is made of.
Where the weight gradients are to wait for a pass of their own, there are no taps; see [Note: a backward pass in two parts].
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from colonnade.cluster.mesh import Axis
from colonnade.cluster.streams import ShardStream
from colonnade.comm.collectives import all_reduce_async, wait
from colonnade.shardformer.layer.deferred import is_deferring

if TYPE_CHECKING:
    from colonnade.shardformer.layer.column_product import Reader


@dataclass(eq=False)
class Entry:
    """One crossing of a region's border with one tensor.

    Args:
        x: the tensor as the inside sees it.
        unread: readers that have not been called yet.
        weights: layer → its weight as this crossing's products use it, with its tap; a weight that does not train has none.
    """

    x: torch.Tensor
    unread: int
    weights: dict[Any, tuple[torch.Tensor, Tap | None]] = field(default_factory=dict)


class Tap:
    """Where a product's backward leaves the making of its weight gradient until the all-reduce is on its way."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], torch.Tensor]] = []

    def gradient(self) -> torch.Tensor:
        first, *others = [make() for make in self.pending]
        self.pending.clear()
        for other in others:
            first += other
        return first


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, works: list[dist.Work | None], taps: list[Tap]) -> torch.Tensor:
        ctx.axis, ctx.works, ctx.taps = axis, works, taps
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        while ctx.works:
            wait(ctx.works.pop(), ctx.axis)
        for tap in ctx.taps:  # a backward for some inputs only leaves taps unread; the next must not find that
            tap.pending.clear()
        return grad, None, None, None


class _Tap(Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, tap: Tap) -> torch.Tensor:
        ctx.tap = tap
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.tap.gradient(), None


class _StartReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, works: list[dist.Work | None]) -> torch.Tensor:
        ctx.axis, ctx.works = axis, works
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad = grad.contiguous()  # made by the products of this region, and no one else's
        ctx.works.append(all_reduce_async(grad, ctx.axis))
        return grad, None, None


class Region:
    """Shared by the parallel layers of one block; column-parallel layers join it when they are made.

    Args:
        axis: the axis over which features are split inside.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.readers: list[Reader] = []
        self._seen: torch.Tensor | None = None
        self._entry: Entry | None = None
        self._owner: nn.Module | None = None
        self._stream = ShardStream(axis.rank)

    def join(self, layer: Reader) -> None:
        """Make a layer one of those that read the region's input."""
        self.readers.append(layer)

    def enter(self, x: torch.Tensor) -> Entry:
        """Cross the border with `x`, or get what an earlier reader of `x` got.

        Traffic: backward one all-reduce of x.numel() for each crossing.
        """
        if self._owner is not None and self._owner.training and _drops(self._owner):
            self._stream.begin(x.device)
        if self._seen is not x or self._entry is None:
            self._seen, self._entry = x, self._cross(x)
        entry = self._entry
        entry.unread -= 1
        if entry.unread <= 0:  # nothing is kept after the last reader
            self._seen = self._entry = None
        return entry

    def _cross(self, x: torch.Tensor) -> Entry:
        if self.axis.size == 1 or not (x.requires_grad and torch.is_grad_enabled()):
            return Entry(x, len(self.readers))
        works: list[dist.Work | None] = []
        taps: list[Tap] = []
        x = _Wait.apply(x, self.axis, works, taps)
        weights: dict[Any, tuple[torch.Tensor, Tap | None]] = {}
        for layer in () if is_deferring() else self.readers:
            tap = Tap() if layer.weight.requires_grad else None
            if tap is not None:
                taps.append(tap)
            weights[layer] = (layer.weight if tap is None else _Tap.apply(layer.weight, tap), tap)
        return Entry(_StartReduce.apply(x, self.axis, works), len(self.readers), weights)

    def leave(self) -> None:
        """Back outside: random draws are common to all ranks again."""
        self._stream.end()

    def outside(self) -> AbstractContextManager[None]:
        """Inside the block random draws are common to all ranks, wherever it stands."""
        return self._stream.suspended()

    def watch(self, owner: nn.Module) -> None:
        """Let draws inside `owner`, the module whose forward crosses the region, be this rank's own.

        See [Note: one state, two streams]. The region ends at its row-parallel layer, at the latest when the
        owner's forward returns or raises.
        """
        if self.axis.size > 1 and self._owner is None:
            self._owner = owner
            owner.register_forward_hook(self._after_owner, always_call=True)

    def _after_owner(self, *_: object) -> None:
        self._seen = self._entry = None
        self._stream.end()


def _drops(owner: nn.Module) -> bool:
    """Whether the owner could draw a dropout mask: as a module, or as a probability it passes to a function."""
    values = vars(owner)
    if any("drop" in name and isinstance(value, float) and value > 0 for name, value in values.items()):
        return True
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in values["_modules"].values())
