"""Collectives over one axis: counted in the ledger, and failing with the name of what failed.

Every tensor that travels between ranks in this library goes through this file. Over an axis of one rank each
function is the identity and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from colonnade.cluster.mesh import Axis
from colonnade.comm.ledger import record
from colonnade.comm.threads import ThreadGroup
from colonnade.errors import CommunicationError

# the name before torch 2.13 is deprecated there
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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


def wait(work: dist.Work | None, axis: Axis) -> None:
    """Wait for a work started over the axis."""
    if work is not None:
        with naming("waiting for all_reduce", axis):
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
