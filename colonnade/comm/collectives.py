"""Collectives over one axis: counted in the ledger, and failing with the name of what failed.

Every tensor that travels between ranks in this library goes through this file. Over an axis of one rank each
function is the identity and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from colonnade.cluster.mesh import Axis
from colonnade.comm.ledger import record
from colonnade.comm.threads import ThreadGroup
from colonnade.errors import CommunicationError

# the names before torch 2.13 are deprecated there
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def naming(operation: str, axis: Axis) -> Iterator[None]:
    """Name the collective in the error when a peer is gone or a time-out passes."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise CommunicationError(
            f"{operation} over {axis} did not complete; a peer is gone, or not every rank made this call: {error}"
        ) from error


def all_reduce(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum a contiguous tensor over the axis, in place, and return it."""
    if axis.size > 1:
        if isinstance(axis.group, ThreadGroup):
            return _reduce_in_threads(tensor, axis, axis.group)
        record("all_reduce", axis.name, tensor.numel())
        with naming("all_reduce", axis):
            dist.all_reduce(tensor, group=axis.group)
    return tensor


def _reduce_in_threads(tensor: torch.Tensor, axis: Axis, group: ThreadGroup) -> torch.Tensor:
    first, *others = group.exchange(f"all_reduce of {tuple(tensor.shape)}", axis.rank, tensor)
    for other in others:
        first = first + other
    return tensor.copy_(first)


def all_reduce_async(tensor: torch.Tensor, axis: Axis) -> dist.Work | None:
    """Start `all_reduce` and return the work to wait for (None over one rank)."""
    if axis.size == 1:
        return None
    if isinstance(axis.group, ThreadGroup):
        _reduce_in_threads(tensor, axis, axis.group)
        return None
    record("all_reduce", axis.name, tensor.numel())
    with naming("all_reduce", axis):
        return dist.all_reduce(tensor, group=axis.group, async_op=True)


def wait(work: dist.Work | None, axis: Axis, operation: str = "all_reduce") -> None:
    """Wait for a work started over the axis."""
    if work is not None:
        with naming(f"waiting for {operation}", axis):
            work.wait()


def all_gather(tensor: torch.Tensor, axis: Axis) -> list[torch.Tensor]:
    """The tensors of all ranks of the axis, in order of position; shapes must agree."""
    if axis.size == 1:
        return [tensor]
    if isinstance(axis.group, ThreadGroup):
        return axis.group.exchange(f"all_gather of {tuple(tensor.shape)}", axis.rank, tensor)
    record("all_gather", axis.name, tensor.numel() * axis.size)
    tensor = tensor.contiguous()
    out = tensor.new_empty((axis.size, *tensor.shape))
    with naming("all_gather", axis):
        _gather_into(out.view(-1), tensor.view(-1), group=axis.group)
    return list(out.unbind(0))


def all_gather_dim(tensor: torch.Tensor, axis: Axis, dim: int, sizes: list[int]) -> torch.Tensor:
    """Join tensors whose extent along `dim` may differ between ranks.

    Args:
        sizes: extent along `dim` on each rank of the axis. Shorter ones are padded on the wire.
    """
    if axis.size == 1:
        return tensor
    dim, longest = dim % tensor.dim(), max(sizes)
    if tensor.shape[dim] < longest:
        shape = list(tensor.shape)
        shape[dim] = longest - tensor.shape[dim]
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(all_gather(tensor, axis), sizes)], dim)


class ScatteredSum:
    """A reduce-scatter under way; `reduce_scatter_start` makes it."""

    def __init__(self, axis: Axis, work: dist.Work | None, parts: torch.Tensor) -> None:
        self.axis, self.work, self.parts = axis, work, parts

    def wait(self, out: torch.Tensor, add: bool = False) -> None:
        """Write this rank's part of the sum into `out` [own size], or add it to what is there.

        16-bit numbers are summed in float32 where this rank does it, and rounded once.
        """
        wait(self.work, self.axis, "reduce_scatter")
        if len(self.parts) == 1:
            total = self.parts[0]
        elif self.parts.element_size() >= 4:
            if not add and out.dtype == self.parts.dtype:
                torch.sum(self.parts, 0, out=out)
                return
            total = self.parts.sum(0)
        else:
            total = self.parts.sum(0, dtype=torch.float32)
        out.add_(total) if add else out.copy_(total)


def reduce_scatter_start(
    flat: torch.Tensor, sizes: Sequence[int], axis: Axis, workspace: Callable[[int], torch.Tensor] | None = None
) -> ScatteredSum:
    """Start to sum a flat tensor over the axis, of which each rank gets its part. It must stay as it is until `wait`.

    gloo's own reduce-scatter moves every element twice and blocks the caller. There, and where the parts differ in size,
    the parts are exchanged by an all-to-all and each rank adds up what it receives: what a reduce-scatter has to move.

    Args:
        flat: the parts for all ranks, one after the other.
        sizes: elements of each part.
        workspace: gives an uninitialised flat tensor of so many elements, of the dtype and device of `flat`.
    """
    mine = sizes[axis.rank]
    if axis.size == 1:
        return ScatteredSum(axis, None, flat.view(1, -1))
    record("reduce_scatter", axis.name, flat.numel())
    make = workspace or flat.new_empty
    with naming("reduce_scatter", axis):
        if dist.get_backend(axis.group) != "gloo" and len(set(sizes)) == 1:
            part = make(mine)
            return ScatteredSum(
                axis, _reduce_scatter(part, flat, group=axis.group, async_op=True), part.view(1, -1)
            )
        parts = make(axis.size * mine)
        work = dist.all_to_all_single(parts, flat, [mine] * axis.size, list(sizes), group=axis.group, async_op=True)
        return ScatteredSum(axis, work, parts.view(axis.size, -1))


def gather_in_place_start(flat: torch.Tensor, sizes: Sequence[int], axis: Axis) -> list[dist.Work]:
    """Start to fill a flat tensor, of which each rank has its own part, with the parts of all; returns what to wait for.

    Args:
        flat: the parts of all ranks, one after the other.
        sizes: elements of each part.
    """
    if axis.size == 1:
        return []
    record("all_gather", axis.name, flat.numel())
    parts = flat.split(list(sizes))
    with naming("all_gather", axis):
        if len(set(sizes)) == 1:
            return [_gather_into(flat, parts[axis.rank], group=axis.group, async_op=True)]
        return [
            dist.broadcast(part, src=rank, group=axis.group, async_op=True)
            for part, rank in zip(parts, axis.ranks)
            if part.numel()
        ]


def broadcast(tensor: torch.Tensor, axis: Axis, src: int = 0) -> torch.Tensor:
    """Copy the tensor of the rank at position `src` to all ranks of the axis, in place, and return it."""
    if axis.size > 1:
        record("broadcast", axis.name, tensor.numel())
        with naming("broadcast", axis):
            dist.broadcast(tensor, src=axis.ranks[src], group=axis.group)
    return tensor


def all_gather_object(value: Any, axis: Axis) -> list[Any]:
    """The picklable values of all ranks of the axis. For set-up and saving, not for the training step."""
    if axis.size == 1:
        return [value]
    if isinstance(axis.group, ThreadGroup):
        return axis.group.exchange("all_gather_object", axis.rank, value)
    out: list[Any] = [None] * axis.size
    record("all_gather_object", axis.name, axis.size)
    with naming("all_gather_object", axis):
        dist.all_gather_object(out, value, group=axis.group)
    return out


def send(tensor: torch.Tensor, axis: Axis, dst: int) -> None:
    """Send a contiguous tensor to the rank at position `dst`."""
    record("send", axis.name, tensor.numel())
    with naming("send", axis):
        dist.send(tensor, dst=axis.ranks[dst], group=axis.group)


def receive(tensor: torch.Tensor, axis: Axis, src: int) -> torch.Tensor:
    """Receive into a contiguous tensor of the sender's shape and dtype, and return it."""
    record("receive", axis.name, tensor.numel())
    with naming("receive", axis):
        dist.recv(tensor, src=axis.ranks[src], group=axis.group)
    return tensor
