"""Storage: parameters that lie one behind the other in a flat tensor and are views of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from colonnade.zero.plan import StoragePlan


class Piece(NamedTuple):
    """What of a parameter lies in a range: elements `start` to `stop` of it, at `offset` of the range."""

    param: nn.Parameter
    start: int
    stop: int
    offset: int

    @property
    def there(self) -> slice:
        """The elements' place in the range."""
        return slice(self.offset, self.offset + self.stop - self.start)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor as large as the parameter, flat."""
        return tensor.reshape(-1)[self.start : self.stop]


class Storage:
    """The flat parameters of a plan.

    Making one moves the parameters into it; the Parameter objects stay, and are views from then on.

    Args:
        plan: where they lie.
        dtype: format to hold them in.
    """

    def __init__(self, plan: StoragePlan, dtype: torch.dtype) -> None:
        self.plan = plan
        self.flat = torch.zeros(plan.numel, dtype=dtype, device=plan.places[0].param.device)
        begin, size = self.flat.data_ptr(), self.flat.element_size()
        self._addresses = [begin + place.start * size for place in plan.places]
        self.attach()

    def attach(self) -> None:
        """Make every parameter a view of the storage again, with the value it has now, where something changed that."""
        for place, address in zip(self.plan.places, self._addresses):
            param = place.param
            if param.data_ptr() != address or param.dtype != self.flat.dtype:
                view = self.flat[place.start : place.stop].view(param.shape)
                view.copy_(param.data)
                grad, param.grad = param.grad, None
                param.data = view
                param.grad = None if grad is None else grad.to(view.dtype)

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """What lies between two places of the storage, padding left out."""
        for place in self.plan.places:
            first, last = max(start, place.start), min(stop, place.stop)
            if first < last:
                yield Piece(place.param, first - place.start, last - place.start, first - start)
