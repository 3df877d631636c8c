"""Folders of weights, one tensor at a time: a training checkpoint, or a folder in the format of the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from colonnade.checkpoint.hub_folder import has_weights, read_headers
from colonnade.checkpoint.manifest import Key, StoredTensor
from colonnade.checkpoint.remote import is_remote
from colonnade.checkpoint.staged_folder import locate
from colonnade.checkpoint.tensor_file import TensorFile
from colonnade.checkpoint.tensor_header import DTYPES
from colonnade.checkpoint.training_items import IMPLEMENTATION
from colonnade.checkpoint.training_load import Checkpoint, open_checkpoint, read_into
from colonnade.cluster.mesh import Axis
from colonnade.model.pieces import Piece
from colonnade.precision.state import Shard


@dataclass(frozen=True)
class Tensor:
    """A logical tensor that can be read: its shape and its format."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source:
    """What a folder holds.

    Args:
        path: of a training checkpoint, of a folder of such, or of a model in the format of the hub.

    Raises:
        CheckpointError: it is none of these, or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        local = Path(path)
        self.is_hub = not is_remote(path) and local.is_dir() and has_weights(local)
        self.checkpoint: Checkpoint | None = None if self.is_hub else open_checkpoint(path, Axis.alone("world"))
        self._stored = read_headers(locate(local, has_weights)) if self.is_hub else {}
        self.tensors: Mapping[Key, Tensor] = (
            {Key("model", name): Tensor(s.shape, DTYPES[s.dtype]) for name, s in self._stored.items()}
            if self.checkpoint is None
            else {key: Tensor(t.shape, t.dtype) for key, t in self.checkpoint.manifest.tensors.items()}
        )

    def names_of(self, key: Key) -> tuple[str, ...]:
        """All names of a weight."""
        return (key.name,) if self.checkpoint is None else self.checkpoint.manifest.names.get(key.name, (key.name,))

    def read(self, key: Key) -> torch.Tensor:
        """A whole tensor, in host memory.

        Raises:
            CheckpointError: its file is missing or damaged.
        """
        about = self.tensors[key]
        whole = torch.empty(about.shape, dtype=about.dtype)
        if self.checkpoint is None:
            with TensorFile(self._stored[key.name].file) as opened:
                opened.read(key.name, (0,) * whole.dim(), whole)
        else:
            read_whole(self.checkpoint, key, whole)
        return whole

    def numbers(self) -> Iterator[tuple[str, Any]]:
        """What is no tensor: the step, numbers of the optimizer, options of its groups, and the rest."""
        if self.checkpoint is None:
            return
        found = self.checkpoint
        yield "step", found.manifest.step
        for number, (options, names) in enumerate(found.objects.get("groups", [])):
            yield from (
                (f"group {number}: {key}", value) for key, value in sorted(options.items()) if key not in IMPLEMENTATION
            )
            yield f"group {number}: parameters", sorted(names)
        for part in ("optimizer", "lr_scheduler", "dataloader", "loss_scale", "extra"):
            if part in found.objects:
                yield part, found.objects[part]
        for name, numbers in found.manifest.numbers.items():
            yield from ((f"{name}: {key}", value) for key, value in numbers.items())


def read_whole(checkpoint: Checkpoint, key: Key, target: torch.Tensor) -> None:
    """Fill a tensor of the logical shape."""
    stored: StoredTensor = checkpoint.manifest.tensors[key]
    read_into(checkpoint, [(key, Shard(stored.shape, stored.dtype, [Piece((0,) * target.dim(), target)]))])
