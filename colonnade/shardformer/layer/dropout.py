"""Dropout where ranks hold the same activations, and where they hold different ones.

See [Note: one state, two streams] in cluster/streams.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.cluster.streams import ShardStream
from colonnade.shardformer.layer.sharding import adopt

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class DropoutForReplicatedInput(nn.Dropout):
    """Dropout on activations that every rank of the axis holds whole: the same mask on all of them.

    It draws from the default generator, which must be in the same state on all ranks of the axis; boosting a model
    sees to that.
    """

    @classmethod
    def from_native_module(
        cls, module: nn.Module, process_group: Axis | ProcessGroup | None = None
    ) -> DropoutForReplicatedInput:
        """Take over an `nn.Dropout`."""
        return adopt(module, cls, nn.Dropout)


class DropoutForParallelInput(nn.Dropout):
    """Dropout on activations that are split over the axis: each rank draws a mask of its own.

    Args:
        p: probability that an entry is zeroed.
        process_group: the tensor-parallel group or `Axis`; None for all ranks of the job.
    """

    def __init__(
        self, p: float = 0.5, inplace: bool = False, *, process_group: Axis | ProcessGroup | None = None
    ) -> None:
        super().__init__(p, inplace)
        self._stream = ShardStream(Axis.of(process_group).rank)

    @classmethod
    def from_native_module(
        cls, module: nn.Module, process_group: Axis | ProcessGroup | None = None
    ) -> DropoutForParallelInput:
        """Take over an `nn.Dropout`."""
        layer = adopt(module, cls, nn.Dropout)
        layer._stream = ShardStream(Axis.of(process_group).rank)
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        self._stream.begin(x.device)
        try:
            return F.dropout(x, self.p, True, self.inplace)
        finally:
            self._stream.end()
