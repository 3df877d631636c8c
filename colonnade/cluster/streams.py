"""Random streams: the same dropout mask where ranks hold the same activations, different masks where they differ.

[Note: one state, two streams]
Outside a sharded region all ranks of a tensor-parallel group draw from torch's default generator, which is in the same
state on each of them. Inside a region a rank draws from a stream of its own, seeded from that common state and its
position. The second stream therefore has no state to save: recomputation under activation checkpointing and a resumed
run restore the default generator and get the same masks. A region that draws nothing leaves the default generator
untouched, so a model whose regions hold no dropout draws exactly what one process would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from colonnade.cluster.device import get_rng_state, set_rng_state


def derive_seed(*parts: int | str | bytes) -> int:
    """A 63-bit seed that depends on every part and on their order."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else str(part).encode())
        digest.update(b"/")
    return int.from_bytes(digest.digest(), "little") >> 1


class ShardStream:
    """Switches the default generator to this rank's own stream and back.

    Args:
        rank: this rank's position on the axis over which activations are sharded.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._device = torch.device("cpu")
        self._common: torch.Tensor | None = None
        self._start: torch.Tensor | None = None

    def begin(self, device: torch.device) -> None:
        """Draw from the rank's own stream from now on. Does nothing if that is already so."""
        if self._common is not None:
            return
        self._device, self._common = device, get_rng_state(device)
        seed = derive_seed("shard", self._common.numpy().tobytes(), self.rank)
        _seed_default(device, seed)
        self._start = get_rng_state(device)

    def end(self) -> None:
        """Go back to the common stream, moved on by one draw if anything was drawn in between."""
        if self._common is None or self._start is None:
            return
        used = not torch.equal(get_rng_state(self._device), self._start)
        set_rng_state(self._device, self._common)
        if used:
            torch.rand((), device=self._device)
        self._common = self._start = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Draw from the common stream inside the block, whatever stream is in use around it."""
        if self._common is None:
            yield
            return
        own = get_rng_state(self._device)
        set_rng_state(self._device, self._common)
        try:
            yield
        finally:
            self._common = get_rng_state(self._device)
            set_rng_state(self._device, own)


def _seed_default(device: torch.device, seed: int) -> None:
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)


def seed_replica(seed: int, replica: int, stage: int = 0) -> None:
    """Give each stage of each data-parallel replica its own default stream; stage 0 of replica 0 keeps the state it has.

    Stages work on different layers: from one stream they would draw the same masks for them.
    """
    if stage:
        torch.manual_seed(derive_seed("stage", seed, replica, stage))
    elif replica:
        torch.manual_seed(derive_seed("replica", seed, replica))
