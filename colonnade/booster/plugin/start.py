"""Bringing all ranks to the same starting point before a model is split."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from colonnade.cluster.device import current_device, get_rng_state, set_rng_state
from colonnade.cluster.log import get_logger
from colonnade.cluster.mesh import ParallelMesh
from colonnade.cluster.streams import seed_replica
from colonnade.comm.collectives import all_gather_object, broadcast
from colonnade.errors import UsageError, explain
from colonnade.model.lazy import materialise

log = get_logger(__name__)


def start_alike(model: nn.Module, mesh: ParallelMesh) -> None:
    """Give every rank rank 0's weights, if they differ, and its random state, apart for each replica and pipeline stage.

    The ranks of a tensor-parallel group then draw the same dropout masks outside sharded regions, all others different ones.
    """
    if mesh.world.size > 1:
        _same_weights(model, mesh)
        _same_random_state(mesh)
    seed_replica(torch.initial_seed(), mesh.rank("dp"), mesh.rank("pp"))


def put_in_place(model: nn.Module) -> None:
    """Put a model that has been split on this process's device; one on the meta device gets memory for what is left of it."""
    if any(p.is_meta for p in model.parameters()):
        materialise(model, current_device(), current_device())
    else:
        model.to(current_device())


def _same_weights(model: nn.Module, mesh: ParallelMesh) -> None:
    tensors = [*model.parameters(), *model.buffers()]
    fingerprint = [(t.shape, t.dtype, "meta" if t.is_meta else _checksum(t)) for t in tensors]
    of_ranks = all_gather_object(fingerprint, mesh.world)
    if all(other == fingerprint for other in of_ranks):
        return
    if any(kind == "meta" for of_rank in of_ranks for _, _, kind in of_rank):
        raise UsageError(
            explain(
                f"some ranks have built this {type(model).__name__} on the meta device and others have not, or other parts of it.",
                [("try", "the same on all ranks; load weights after boost, which reads only what a rank needs")],
            )
        )
    log.warning("the ranks built different weights; all take those of rank 0")
    for tensor in tensors:
        data = tensor.detach().to(current_device()).contiguous()  # the model may still be in host memory
        broadcast(data, mesh.world)
        tensor.data.copy_(data)


def _checksum(tensor: torch.Tensor) -> int:
    data = tensor.detach().cpu().contiguous().view(-1)
    if not data.numel():
        return 0
    return zlib.crc32(data.view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer


def _same_random_state(mesh: ParallelMesh) -> None:
    device = current_device()
    states = {place: get_rng_state(place) for place in dict.fromkeys((torch.device("cpu"), device))}
    seed = torch.tensor([torch.initial_seed() & (2**63 - 1)], dtype=torch.int64, device=device)
    torch.manual_seed(int(broadcast(seed, mesh.world)))  # what torch.initial_seed() reads from now on
    for place, state in states.items():
        set_rng_state(place, broadcast(state.to(device), mesh.world).cpu())
