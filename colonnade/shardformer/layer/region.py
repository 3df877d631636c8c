"""Region: the stretch between column-parallel and row-parallel layers, entered once however many layers open it.

[Note: entering once]
q, k and v (or gate and up) read one tensor. If each of them were its own entry, each would all-reduce its own
input gradient; entered once, the three gradients are added first and reduced together. The layers of a region share
one Region object: the first to be called with a tensor enters, the others with the same tensor get what it got. No
forward of the model has to change for it, and a layer that reads another tensor (cross attention) enters by itself.
"""

from __future__ import annotations

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.cluster.streams import ShardStream
from colonnade.comm.regions import copy_to_region


class Region:
    """Shared by the parallel layers of one block.

    Args:
        axis: the axis over which features are split inside.
        readers: how many column-parallel layers read the input; after the last, nothing is kept.
    """

    def __init__(self, axis: Axis, readers: int = 1) -> None:
        self.axis = axis
        self.readers = readers
        self._seen: torch.Tensor | None = None
        self._entered: torch.Tensor | None = None
        self._left = 0
        self._owner: nn.Module | None = None
        self._stream = ShardStream(axis.rank)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor as the inside of the region sees it. Traffic: backward one all-reduce of it per region."""
        if self._owner is not None and self._owner.training and _drops(self._owner):
            self._stream.begin(x.device)
        if self.readers == 1:
            return copy_to_region(x, self.axis)
        if self._seen is not x or self._entered is None:
            self._seen, self._entered, self._left = x, copy_to_region(x, self.axis), self.readers
        entered, self._left = self._entered, self._left - 1
        if self._left == 0:
            self._seen = self._entered = None
        return entered

    def leave(self) -> None:
        """Back outside: random draws are common to all ranks again."""
        self._stream.end()

    def watch(self, owner: nn.Module) -> None:
        """Let draws inside `owner`, the module whose forward crosses the region, be this rank's own.

        See [Note: one state, two streams]. The region ends at its row-parallel layer, at the latest when the
        owner's forward returns or raises.
        """
        if self.axis.size > 1 and self._owner is None:
            self._owner = owner
            owner.register_forward_hook(self._after_owner, always_call=True)

    def _after_owner(self, *_: object) -> None:
        self._seen = self._entered = None
        self._stream.end()


def _drops(owner: nn.Module) -> bool:
    """Whether the owner could draw a dropout mask: as a module, or as a probability it passes to a function."""
    values = vars(owner)
    if any("drop" in name and isinstance(value, float) and value > 0 for name, value in values.items()):
        return True
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in values["_modules"].values())
