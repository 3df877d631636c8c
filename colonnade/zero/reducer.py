"""ShardReducer: averages gradients over data-parallel ranks, each rank keeping its part."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.reducer import BucketReducer
from colonnade.zero.bucket import ShardBucket


class ShardReducer(BucketReducer[ShardBucket]):
    """Averages the gradients of buckets over an axis; see `BucketReducer`.

    Args:
        buckets: in the order in which they become complete.
        axis: the data-parallel ranks.
        overlap: reduce a bucket while the backward pass goes on.

    Attributes:
        used: parameters that have had a gradient on any rank since the last `forget`.
        zeroed: those that had one before; theirs is zero now, unless it has been dropped by `FlatShards.zero_grad`.

    Traffic of a backward pass: one reduce-scatter of every gradient element, and one all-gather of two numbers.
    """

    IN_FLIGHT = 2  # with any number under way at a time, memory would grow to several times that of the parameters

    def __init__(self, buckets: Iterable[ShardBucket], axis: Axis, overlap: bool = True) -> None:
        super().__init__(axis, overlap, self.IN_FLIGHT)
        self.used: set[nn.Parameter] = set()
        self.zeroed: set[nn.Parameter] = set()
        self._watch(buckets)
        self.unreduced = any(param.grad is not None for param in self._home)  # from before boost

    def _collect(self, param: nn.Parameter) -> None:
        homes = self._home[param]
        if param.grad is None or any(bucket.launched for bucket in homes):
            return  # too late for this round: it stays on the parameter until the end of the backward pass
        grad = param.grad.detach()
        for bucket in homes:
            bucket.collect(param, grad if grad.layout == torch.strided else grad.to_dense())
        param.grad = None

    def _late(self) -> dict[nn.Parameter, torch.Tensor]:
        return {param: param.grad for param in self._home if param.grad is not None}

    def _unused(self) -> set[nn.Parameter]:
        unused = {p for p, homes in self._home.items() if p not in homes[0].collected and p.grad is None}
        self.used |= self._home.keys() - unused
        return unused

    def _settle(self, unused: dict[nn.Parameter, bool]) -> None:
        self.used |= {param for param, by_any in unused.items() if by_any}

    def _add_late(self, late: dict[nn.Parameter, torch.Tensor]) -> None:
        for param, grad in late.items():
            for bucket in self._home[param]:
                bucket.collect(param, grad)
            param.grad = None
        for bucket in self.buckets:
            bucket.launch(self.axis)
            bucket.complete(self.axis)
            bucket.reset()

    @property
    def to_step(self) -> set[nn.Parameter]:
        """Parameters that have a gradient, be it zero, and so are stepped on."""
        return self.used | self.zeroed

    def covers(self, param: nn.Parameter) -> bool:
        return param in self._home or not param.numel()

    def forget(self) -> None:
        """Drop all gradients, those of a backward pass that has not come to its end included."""
        super().forget()
        for bucket in self.buckets:
            bucket.forget()
        self.zeroed |= self.used
        self.used.clear()
