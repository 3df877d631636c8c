"""ShardBucket: the gradients of a range of a storage, each rank keeping the average of its own part.

Gradients never stay on the parameters: each is copied into the bucket's buffer the moment it is ready, while it is still in
the cache, and dropped. Stage 1 has one buffer a bucket for good, in which gradients may be accumulated before they travel.
Stage 2 borrows a buffer while a backward pass fills it and keeps only the rank's part.

[Note: a gradient for many buckets]
The gradient of a huge parameter is ready for all its buckets at once. Under stage 2 it waits as it is, and each bucket borrows
a buffer when its turn comes: otherwise there would be a second copy of it in buffers, and the pool would keep them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.buffers import BufferPool
from colonnade.comm.collectives import ScatteredSum, reduce_scatter_start
from colonnade.comm.reducer import Bucket
from colonnade.zero.plan import BucketPlan
from colonnade.zero.storage import Piece, Storage


class ShardBucket(Bucket):
    """Gradients that travel together, of which each rank keeps its part.

    Args:
        storage, plan: what they are the gradients of.
        axis: the data-parallel ranks.
        pool: where buffers are borrowed.
        keeps_buffer: have a buffer of its own (stage 1).
        communication_dtype: format in which gradients travel; None for that of the storage.

    Attributes:
        gradient: average over the ranks of this rank's part, summed over backward passes; None before the first.
        collected: parameters whose gradient has come since the last reduction.
        launched: whether it has left in the present backward pass.
    """

    def __init__(
        self,
        storage: Storage,
        plan: BucketPlan,
        axis: Axis,
        pool: BufferPool,
        keeps_buffer: bool,
        communication_dtype: torch.dtype | None,
    ) -> None:
        self.storage, self.plan, self.axis, self.pool, self.keeps_buffer = storage, plan, axis, pool, keeps_buffer
        self.pieces = {piece.param: piece for piece in storage.pieces(plan.start, plan.start + plan.numel)}
        super().__init__(list(self.pieces))
        self._gaps = list(_gaps(self.pieces.values(), plan.numel))
        self.travels_as = communication_dtype or storage.flat.dtype
        self.dtype = torch.promote_types(storage.flat.dtype, self.travels_as)
        self.gradient: torch.Tensor | None = None
        self.collected: set[nn.Parameter] = set()
        self.launched = False
        self._buffer: torch.Tensor | None = None
        self._carried: torch.Tensor | None = None  # what stage 1 has reduced, while its buffer is filled again
        self._own: torch.Tensor | None = None  # where stage 2 keeps its part
        self._sum: ScatteredSum | None = None
        self._lent: list[torch.Tensor] = []
        self._waits = not keeps_buffer and plan.numel < storage.plan.numel  # see [Note: a gradient for many buckets]
        self._whole: dict[nn.Parameter, torch.Tensor] = {}

    @property
    def owned(self) -> slice:
        """This rank's part of the buffer."""
        start, stop = self.plan.part(self.axis.rank)
        return slice(start - self.plan.start, stop - self.plan.start)

    def collect(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        """Take over the gradient of a parameter, or add it to what is there of it."""
        if self._waits and param not in self.collected and param not in self._whole:
            self._whole[param] = grad
            return
        if param in self._whole:
            self._write(param, self._whole.pop(param))
        self._write(param, grad)

    def _write(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        buffer, piece = self._filling(), self.pieces[param]
        if param in self.collected:
            buffer[piece.there].add_(piece.of(grad), alpha=1.0 / self.axis.size)
        else:
            torch.mul(piece.of(grad), 1.0 / self.axis.size, out=buffer[piece.there])
            self.collected.add(param)

    def _filling(self) -> torch.Tensor:
        if not self.collected and self.keeps_buffer and self.gradient is not None:
            self._carried, self.gradient = self.gradient.clone(), None
        if self._buffer is None:
            device = self.storage.flat.device
            if self.keeps_buffer:
                self._buffer = torch.empty(self.plan.numel, dtype=self.dtype, device=device)
            else:
                self._buffer = self.pool.take(self.plan.numel, self.dtype, device)
        return self._buffer

    def _zero_the_rest(self, buffer: torch.Tensor) -> None:
        """Zero what no gradient has been written to: parameters without one, and padding."""
        for gap in self._gaps:
            buffer[gap].zero_()
        for param in self.pieces.keys() - self.collected:
            buffer[self.pieces[param].there].zero_()

    def launch(self, axis: Axis) -> None:
        for param in list(self._whole):
            self._write(param, self._whole.pop(param))
        buffer, self.launched = self._filling(), True
        self._zero_the_rest(buffer)
        sent = buffer
        if self.travels_as != buffer.dtype:
            sent = self._borrow(buffer.numel())
            sent.copy_(buffer)
        self._sum = reduce_scatter_start(sent, self.plan.sizes, axis, self._borrow)

    def _borrow(self, numel: int) -> torch.Tensor:
        self._lent.append(self.pool.take(numel, self.travels_as, self.storage.flat.device))
        return self._lent[-1]

    def complete(self, axis: Axis) -> None:
        if self._sum is None or self._buffer is None:
            return
        if self.keeps_buffer:
            self.gradient = self._buffer[self.owned]
            self._sum.wait(self.gradient)
            if self._carried is not None:
                self.gradient.add_(self._carried)
        else:
            if self._own is None:
                self._own = self._buffer.new_empty(self.plan.sizes[axis.rank])
            self._sum.wait(self._own, add=self.gradient is not None)
            self.gradient = self._own
            self.pool.give(self._buffer)
            self._buffer = None
        while self._lent:
            self.pool.give(self._lent.pop())
        self._sum = self._carried = None

    def reset(self) -> None:
        super().reset()
        self.collected.clear()
        self._whole.clear()
        self.launched = False

    def forget(self) -> None:
        """Drop all gradients, reduced or not."""
        if self._buffer is not None and not self.keeps_buffer:
            self.pool.give(self._buffer)
            self._buffer = None
        self.gradient = self._carried = None
        self.reset()


def _gaps(pieces: Iterable[Piece], end: int) -> Iterator[slice]:
    """What lies between pieces, and behind the last one."""
    last = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.offset > last:
            yield slice(last, piece.offset)
        last = piece.there.stop
    if last < end:
        yield slice(last, end)
