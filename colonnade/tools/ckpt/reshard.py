"""A checkpoint as another number of ranks would have written it. Never needed: any number of ranks reads any checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from colonnade.checkpoint.file_sum import FileSum
from colonnade.checkpoint.manifest import Chunk, Key, Manifest, StoredTensor
from colonnade.checkpoint.root import FILES, is_checkpoint
from colonnade.checkpoint.staged_folder import StagedFolder
from colonnade.checkpoint.tensor_file import write_tensors
from colonnade.checkpoint.tensor_header import SUFFIX
from colonnade.checkpoint.training_load import Checkpoint, open_checkpoint, read_into
from colonnade.cluster.mesh import Axis
from colonnade.errors import ConfigError
from colonnade.model.layout import deal
from colonnade.model.pieces import Piece
from colonnade.precision.state import Shard


def reshard(path: str | Path, out: Path, ranks: int) -> None:
    """Write the latest checkpoint of a folder, or the one of a path, into as many files; one file is in memory at a time.

    Raises:
        CheckpointError: it is damaged, or `out` holds something else.
        ConfigError: `ranks` is no number of files.
    """
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks}: a whole number of at least 1.")
    checkpoint = open_checkpoint(path, Axis.alone("world"), thorough=True)
    folder = StagedFolder(out, is_checkpoint, FILES)
    try:
        staging = folder.open()
        files, tensors = {}, {key: replace(t, chunks=()) for key, t in checkpoint.manifest.tensors.items()}
        for rank in range(ranks):
            name = f"rank-{rank:05d}-of-{ranks:05d}{SUFFIX}"
            files[name] = _write(checkpoint, staging / name, rank, ranks, tensors)
        for name, found in checkpoint.manifest.files.items():
            if not name.endswith(SUFFIX):
                (staging / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(checkpoint.file(name), staging / name)
                files[name] = found
        old = checkpoint.manifest
        about = {**old.about, "rewritten": f"from {old.about.get('layout', '?')} as {ranks} files"}
        Manifest(old.step, tensors, old.names, files, old.parts, about, old.numbers).write(staging)
        folder.commit()
    finally:
        folder.discard()


def _write(checkpoint: Checkpoint, file: Path, rank: int, ranks: int, tensors: dict[Key, StoredTensor]) -> FileSum:
    """The file of one rank; its chunks are entered."""
    parts: dict[str, torch.Tensor] = {}
    chunks = {}
    for number, (key, stored) in enumerate(list(tensors.items())):
        rows = stored.shape[0] if stored.shape else 1
        start, stop = deal(rows, ranks)[rank] if rows >= ranks else ((0, rows) if number % ranks == rank else (0, 0))
        if start >= stop and not (rows == 0 and rank == 0):
            continue
        offset = (start, *[0] * (len(stored.shape) - 1)) if stored.shape else ()
        part = torch.empty((stop - start, *stored.shape[1:]) if stored.shape else (), dtype=stored.dtype)
        read_into(checkpoint, [(key, Shard(stored.shape, stored.dtype, [Piece(offset, part)]))])
        text = f"{key.part}/{key.name}" + (f"/{key.state}" if key.state else "") + f"@{','.join(map(str, offset))}"
        parts[text], chunks[text] = part, [key, stored.shape, offset]
        tensors[key] = replace(stored, chunks=(*stored.chunks, Chunk(file.name, text, offset, tuple(part.shape))))
    return write_tensors(parts, file, {"chunks": json.dumps(chunks, separators=(",", ":"))})
