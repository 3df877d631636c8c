"""Who writes what: every entry of every tensor once, what several ranks hold spread over them. Arithmetic.

[Note: replicas]
Along the axes that do not split a tensor all ranks hold the same of it; they are its replicas. A large tensor's boxes are cut
into as many runs of rows, one for each replica; a small one is written by one of them, which its name decides. So ranks
write about as much as one another, and none has to be asked: each knows its share from its place on the mesh. Only which
stages of a pipeline hold a parameter is told once.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence

from colonnade.checkpoint.manifest import Key
from colonnade.cluster.mesh import AXES, ParallelMesh
from colonnade.model.layout import deal
from colonnade.model.pieces import Piece
from colonnade.precision.state import Shard

SMALLEST_PART = 1 << 18  # bytes; less is not worth a chunk of its own


def own_pieces(key: Key, shards: Sequence[Shard], mesh: ParallelMesh, stages: Sequence[int]) -> Iterator[Piece]:
    """What this rank writes of a tensor.

    Args:
        shards: what it holds of it; several where it holds several parts.
        stages: positions on "pp" of the ranks that hold the tensor.
    """
    for shard in shards:
        index, count = _replica(mesh, shard.axes, stages)
        nbytes = sum(piece.tensor.numel() for piece in shard.pieces) * shard.dtype.itemsize
        parts = min(count, max(1, nbytes // SMALLEST_PART))
        part = (index - zlib.crc32(str(key).encode())) % count
        if part >= parts:
            continue
        if not math.prod(shard.shape):  # no entries, but a name
            yield from [Piece((0,) * len(shard.shape), p.tensor) for p in shard.pieces[:1]]
        for piece in shard.pieces:
            yield from _rows(piece, part, parts)


def _rows(piece: Piece, part: int, parts: int) -> Iterator[Piece]:
    """One of several equal runs of rows of a box."""
    offset, tensor = piece
    if parts == 1 or not tensor.dim():
        if part == 0 and tensor.numel():
            yield piece
        return
    start, stop = deal(tensor.shape[0], parts)[part]
    if start < stop:
        yield Piece((offset[0] + start, *offset[1:]), tensor[start:stop])


def _replica(mesh: ParallelMesh, axes: Sequence[str], stages: Sequence[int]) -> tuple[int, int]:
    """Which of how many ranks that hold the same this one is."""
    index, count = 0, 1
    for name in AXES:
        if name in axes:
            continue
        peers: Sequence[int] = stages if name == "pp" else range(mesh.size(name))
        index, count = index * len(peers) + peers.index(mesh.rank(name)), count * len(peers)
    return index, count


def stages_of(keys: Sequence[Sequence[Key]]) -> Mapping[Key, list[int]]:
    """Which stages hold each tensor, from what each of them holds."""
    found: dict[Key, list[int]] = {}
    for stage, held in enumerate(keys):
        for key in held:
            found.setdefault(key, []).append(stage)
    return found
