"""The low-rank stage of attention: small, shared by all heads, whole on every rank (DeepSeek-V2, 2024, section 2.1).

Keys and values come from one latent c_BSr = x_BSD @ w_rD.T that every head reads, some of it directly. The stage itself
stays whole; a region begins behind it, so that what the ranks' heads send back to the latent is summed once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.regions import copy_to_region
from colonnade.shardformer.layer.sharding import adopt

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LatentLinear(nn.Linear):
    """Linear layer, whole on every rank, whose output is read inside a region by layers made with `inside=True`.

    Traffic: forward none; backward one all-reduce of the gradient of its output.
    Layout: weight and bias whole; their gradients come out whole on every rank.
    """

    axis: Axis

    @classmethod
    def from_native_module(cls, module: nn.Module, process_group: Axis | ProcessGroup | None = None) -> LatentLinear:
        """Take over an `nn.Linear`; its Parameter objects stay as they are."""
        layer = adopt(module, cls, nn.Linear)
        layer.axis = Axis.of(process_group)
        return layer

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return copy_to_region(super().forward(x_BSD), self.axis)
