"""FSDP's two collectives by way of ours, so that the ledger counts them and gloo takes its fast form of reduce-scatter.

FSDP2 takes any object with these methods (`set_custom_all_gather`, `set_custom_reduce_scatter`); the base classes that
it has for them are private.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import gather_in_place_start, reduce_scatter_start, wait


class _Comm:
    """
    Args:
        axis: the data-parallel ranks.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._others: dict[Any, Axis] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer to communicate with."""
        return torch.empty(*size, dtype=dtype, device=device)

    def axis_of(self, group: Any) -> Axis:
        """The axis, or the part of it that has kept whole parameters (reshard_after_forward=<int>)."""
        if dist.get_process_group_ranks(group) == list(self.axis.ranks):
            return self.axis
        if group not in self._others:
            self._others[group] = Axis.of(group, self.axis.name)
        return self._others[group]


class CountedAllGather(_Comm):
    """All-gather of a unit's parameters."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        axis = self.axis_of(group)
        sizes = [input_tensor.numel()] * axis.size
        mine = output_tensor.split(sizes)[axis.rank]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        works = gather_in_place_start(output_tensor, sizes, axis)
        if async_op:
            return works[0] if works else None
        for work in works:
            wait(work, axis, "all_gather")
        return None


class CountedReduceScatter(_Comm):
    """Reduce-scatter of a unit's gradients: the sum, which FSDP then divides by the number of ranks."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise RuntimeError(f"fully_shard was told to reduce by sums only, and asks for {op}")
        axis = self.axis_of(group)
        reduce_scatter_start(input_tensor, [output_tensor.numel()] * axis.size, axis).wait(output_tensor)
