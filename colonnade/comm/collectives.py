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
    """A reduce-scatter under way; `reduce_scatter_start` makes it.

    Args:
        works: what to wait for.
        parts: what is then to be added up: this rank's part of every rank's tensor, in order, or of their sum alone.
    """

    def __init__(self, axis: Axis, works: Sequence[dist.Work | None], parts: Sequence[torch.Tensor]) -> None:
        self.axis, self.works, self.parts = axis, works, parts

    def wait(self, out: torch.Tensor, add: bool = False) -> None:
        """Write this rank's part of the sum into `out` [own size], or add it to what is there.

        The sum is taken in the order of the ranks, so that it does not depend on who owns what. 16-bit numbers are summed
        in float32 where this rank does it, and rounded once.
        """
        for work in self.works:
            wait(work, self.axis, "reduce_scatter")
        total = self._all_but_the_last()
        direct = not add and out.dtype == total.dtype
        if len(self.parts) > 1:
            total = torch.add(total, self.parts[-1], out=out if direct else None)
        if total is not out:
            out.add_(total) if add else out.copy_(total)

    def _all_but_the_last(self) -> torch.Tensor:
        """The sum of the first parts; it is written over one that this rank has received and needs no more."""
        first, *others = self.parts
        if not others:
            return first
        if first.element_size() < 4:
            first = first.float()
            scratch = first
        else:
            scratch = self.parts[0 if self.axis.rank else 1]
        for other in others[:-1]:
            first = torch.add(first, other, out=scratch)
        return first


def reduce_scatter_start(
    flat: torch.Tensor, sizes: Sequence[int], axis: Axis, workspace: Callable[[int], torch.Tensor] | None = None
) -> ScatteredSum:
    """Start to sum a flat tensor over the axis, of which each rank gets its part. It must stay as it is until `wait`.

    gloo's own reduce-scatter moves every element twice and blocks the caller. There, ranks send each other the parts, and
    each adds up what it receives, which is all that a reduce-scatter has to move. Elsewhere parts of different sizes travel
    by an all-to-all.

    Args:
        flat: the parts for all ranks, one after the other.
        sizes: elements of each part.
        workspace: gives an uninitialised flat tensor of so many elements, of the dtype and device of `flat`.
    """
    mine = sizes[axis.rank]
    if axis.size == 1:
        return ScatteredSum(axis, [], [flat])
    record("reduce_scatter", axis.name, flat.numel())
    make = workspace or flat.new_empty
    parts = flat.split(list(sizes))
    with naming("reduce_scatter", axis):
        if dist.get_backend(axis.group) == "gloo":
            others = list(make((axis.size - 1) * mine).split([mine] * (axis.size - 1)))
            received = [*others[: axis.rank], parts[axis.rank], *others[axis.rank :]]
            return ScatteredSum(axis, _exchange_start(parts, received, axis), received)
        if len(set(sizes)) == 1:
            part = make(mine)
            return ScatteredSum(axis, [_reduce_scatter(part, flat, group=axis.group, async_op=True)], [part])
        whole = make(axis.size * mine)
        work = dist.all_to_all_single(whole, flat, [mine] * axis.size, list(sizes), group=axis.group, async_op=True)
        return ScatteredSum(axis, [work], whole.split([mine] * axis.size))


def gather_in_place_start(flat: torch.Tensor, sizes: Sequence[int], axis: Axis) -> list[dist.Work]:
    """Start to fill a flat tensor, of which each rank has its own part, with the parts of all; returns what to wait for.

    Over gloo each rank sends its part to each other one, which takes half the time of gloo's own all-gather.

    Args:
        flat: the parts of all ranks, one after the other.
        sizes: elements of each part.
    """
    if axis.size == 1:
        return []
    record("all_gather", axis.name, flat.numel())
    parts = flat.split(list(sizes))
    with naming("all_gather", axis):
        if dist.get_backend(axis.group) == "gloo":
            return _exchange_start([parts[axis.rank]] * axis.size, parts, axis)
        if len(set(sizes)) == 1:
            return [_gather_into(flat, parts[axis.rank], group=axis.group, async_op=True)]
        return [
            dist.broadcast(part, src=rank, group=axis.group, async_op=True)
            for part, rank in zip(parts, axis.ranks)
            if part.numel()
        ]


def _exchange_start(given: Sequence[torch.Tensor], received: Sequence[torch.Tensor], axis: Axis) -> list[dist.Work]:
    """Start to send every other rank what is given for it, and to receive from it; nothing travels where that is empty."""
    works: list[dist.Work | None] = []
    for distance in range(1, axis.size):
        to, source = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
        if given[to].numel():
            works.append(dist.isend(given[to], axis.ranks[to], group=axis.group))
        if received[source].numel():
            works.append(dist.irecv(received[source], axis.ranks[source], group=axis.group))
    return [work for work in works if work is not None]


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


def send_start(tensor: torch.Tensor, axis: Axis, dst: int, tag: int = 0) -> dist.Work | None:
    """Start to send a contiguous tensor to the rank at position `dst`; it must not change until the work is done.

    Args:
        tag: what the other side's `receive_start` must say as well; where the backend knows no tags, order decides.
    """
    record("send", axis.name, tensor.numel())
    with naming("send", axis):
        return dist.isend(tensor, axis.ranks[dst], group=axis.group, tag=tag)


def receive_start(tensor: torch.Tensor, axis: Axis, src: int, tag: int = 0) -> dist.Work | None:
    """Start to receive into a contiguous tensor of the sender's shape and dtype; `tag` as of `send_start`."""
    record("receive", axis.name, tensor.numel())
    with naming("receive", axis):
        return dist.irecv(tensor, axis.ranks[src], group=axis.group, tag=tag)
