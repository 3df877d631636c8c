"""A training checkpoint is read, into whatever layout this job has.

Each rank reads the manifest and the Python objects, and of the tensors what it holds. Everything that can be checked is
checked, and told to the other ranks, before anything is changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from colonnade.checkpoint.agreement import Attempt
from colonnade.checkpoint.file_sum import check_length, check_sum
from colonnade.checkpoint.manifest import MANIFEST, Chunk, Key, Manifest, StoredTensor, read_manifest
from colonnade.checkpoint.remote import RemoteFolder, is_remote
from colonnade.checkpoint.root import find_checkpoint
from colonnade.checkpoint.tensor_file import TensorFile
from colonnade.checkpoint.tensor_header import KINDS
from colonnade.checkpoint.training_items import number_from
from colonnade.checkpoint.training_save import OBJECTS
from colonnade.cluster.mesh import Axis
from colonnade.errors import CheckpointError, explain
from colonnade.model.pieces import Piece
from colonnade.precision.state import Shard

UNCHANGED = ("left", "everything as it was: nothing has been loaded")
MIXED = ("left", "a mixture of what was and what was to be loaded: load again before training on")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been opened.

    Args:
        folder: where it lies.
        manifest: what it holds.
        objects: its Python objects.
        file: gives a file of it, on this machine.
    """

    folder: Path
    manifest: Manifest
    objects: dict[str, Any]
    file: Callable[[str], Path]

    def name_of(self, names: Sequence[str]) -> str | None:
        """The name by which it knows a tensor that has these; None where it does not."""
        candidates = [*(self._firsts[name] for name in names if name in self._firsts), *names]
        return next((name for name in candidates if name in self._known), None)

    @cached_property
    def _firsts(self) -> dict[str, str]:
        return {name: first for first, of in self.manifest.names.items() for name in of}

    @cached_property
    def _known(self) -> set[str]:
        return {key.name for key in self.manifest.tensors} | self.manifest.numbers.keys()

    def numbers_of(self, name: str) -> dict[str, Any]:
        """What the optimizer kept as one number for a parameter."""
        return {key: number_from(value) for key, value in self.manifest.numbers.get(name, {}).items()}


def open_checkpoint(path: str | os.PathLike[str], world: Axis, *, thorough: bool = False) -> Checkpoint:
    """Find a checkpoint and read what it says of itself. All ranks call it.

    Args:
        path: a folder of checkpoints, of which the latest is taken, or that of one.
        thorough: read all files and compare their check sums; the ranks share them out. Else only lengths are compared.

    Raises:
        CheckpointError: on every rank; there is none, or a file is missing or damaged, or ranks see different ones.
    """
    attempt = Attempt(world, f"nothing was loaded from {os.fspath(path)}.", (UNCHANGED,))
    there, folder, found = None, None, None
    with attempt:
        there = RemoteFolder(path) if is_remote(path) else None
        if world.rank == 0:
            folder = find_checkpoint(path) if there is None else there.find()
    folder = attempt.agree(folder)[0]
    with attempt:
        found = _opened(there, path, folder)
        files = list(found.manifest.files.items())
        for name, expected in [*files[world.rank :: world.size], (OBJECTS, found.manifest.files[OBJECTS])]:
            if there is not None and not thorough:
                check_length(f"{found.folder}/{name}", there.size(folder, name), expected)
            else:
                check_sum(found.file(name), expected, thorough)
        found.objects.update(torch.load(found.file(OBJECTS), weights_only=True, map_location="cpu"))
    attempt.agree()
    assert found is not None  # else the exchange above has raised
    return found


def _opened(there: RemoteFolder | None, path: str | os.PathLike[str], folder: Any) -> Checkpoint:
    if there is None:
        return Checkpoint(folder, read_manifest(folder), {}, folder.joinpath)
    there.get(folder, MANIFEST)
    return Checkpoint(Path(f"{path}/{folder}"), read_manifest(there.local), {}, partial(there.get, folder))


@dataclass(frozen=True)
class Read:
    """A box of a stored tensor, and the memory that it goes to."""

    chunk: Chunk
    stored: StoredTensor
    start: tuple[int, ...]
    target: torch.Tensor


def reads_for(stored: StoredTensor, pieces: Iterable[Piece]) -> Iterator[Read]:
    """What has to be read to fill boxes of a logical tensor."""
    for offset, target in pieces:
        if not target.numel():
            continue
        whole = [c for c in stored.chunks if c.offset == offset and c.extent == target.shape]
        if whole:
            yield Read(whole[0], stored, (0,) * len(offset), target)
            continue
        for chunk in _distinct(stored.chunks):
            first = [max(a, b) for a, b in zip(offset, chunk.offset)]
            last = [min(a + n, b + m) for a, n, b, m in zip(offset, target.shape, chunk.offset, chunk.extent)]
            if all(a < b for a, b in zip(first, last)):
                part = target[tuple(slice(a - o, b - o) for a, b, o in zip(first, last, offset))]
                yield Read(chunk, stored, tuple(a - o for a, o in zip(first, chunk.offset)), part)


def _distinct(chunks: Sequence[Chunk]) -> Iterable[Chunk]:
    """Of boxes that have been written twice, one."""
    return {(chunk.offset, chunk.extent): chunk for chunk in reversed(chunks)}.values()


@torch.no_grad()
def read_into(checkpoint: Checkpoint, targets: Iterable[tuple[Key, Shard]]) -> int:
    """Fill memory with what is stored. Each file is opened once and read from its beginning to its end.

    Returns:
        Number of bytes read.

    Raises:
        CheckpointError: naming the file, and the tensor where it is not what the manifest says.
    """
    by_file: dict[str, list[Read]] = {}
    for key, shard in targets:
        for read in reads_for(checkpoint.manifest.tensors[key], shard.pieces):
            by_file.setdefault(read.chunk.file, []).append(read)
    nbytes = 0
    for name, reads in sorted(by_file.items()):
        with TensorFile(checkpoint.file(name)) as opened:
            for read in reads:
                _check(opened, read)
            for read in sorted(reads, key=lambda r: opened.entries[r.chunk.key].start):
                opened.read(read.chunk.key, read.start, read.target)
            nbytes += opened.bytes_read
    return nbytes


def _check(opened: TensorFile, read: Read) -> None:
    entry = opened.entries.get(read.chunk.key)
    if entry is None or (entry.shape, entry.dtype) != (read.chunk.extent, read.stored.dtype):
        found = "nothing" if entry is None else f"{KINDS[entry.dtype]} of shape {entry.shape}"
        raise CheckpointError(
            explain(
                f"{opened.file} is not what the manifest says.",
                [
                    ("tensor", read.chunk.key),
                    ("expected", f"{KINDS[read.stored.dtype]} of shape {read.chunk.extent}"),
                    ("found", found),
                ],
            )
        )


@dataclass(frozen=True)
class Match:
    """Which stored tensor fills which of this rank's.

    Args:
        missing: names that the checkpoint has nothing for.
        claimed: tensors of the checkpoint that this rank has a place for.
        wrong: tensors that do not fit: (tensor, expected, found).
    """

    missing: list[str] = field(default_factory=list)
    claimed: set[Key] = field(default_factory=set)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)


def match_model(
    checkpoint: Checkpoint, shards: Mapping[str, Shard], names: Mapping[str, tuple[str, ...]]
) -> tuple[Match, list[tuple[Key, Shard]]]:
    """Find the weights of a model in a checkpoint.

    Args:
        shards: this rank's tensors, by first name.
        names: all their names.

    Returns:
        What fits and what does not, and what is to be read.
    """
    match, targets = Match(), list[tuple[Key, Shard]]()
    for first, shard in shards.items():
        name = checkpoint.name_of(names[first])
        key = Key("model", name or first)
        stored = checkpoint.manifest.tensors.get(key)
        if stored is None:
            match.missing.append(first)
            continue
        match.claimed.add(key)
        targets.append((key, shard))
        if stored.shape != tuple(shard.shape):
            match.wrong.append((first, f"shape {tuple(shard.shape)}", f"shape {stored.shape}"))
        elif stored.dtype.is_floating_point != shard.dtype.is_floating_point:
            match.wrong.append((first, str(shard.dtype), str(stored.dtype)))
    return match, targets


def check_match(checkpoint: Checkpoint, told: Sequence[Match], part: str, strict: bool) -> None:
    """What all ranks have found together.

    Raises:
        CheckpointError: the same on every rank; a shape or a format differs, or `strict` and names are missing or unexpected.
    """
    missing = list(dict.fromkeys(name for each in told for name in each.missing))
    claimed = set().union(*(each.claimed for each in told))
    wrong = list(dict.fromkeys(row for each in told for row in each.wrong))
    unexpected = [str(key) for key in checkpoint.manifest.of_part(part) if key not in claimed]
    if wrong or (strict and (missing or unexpected)):
        rows = [(name, f"this {part} has {expected}, the checkpoint {found}") for name, expected, found in wrong[:5]]
        if len(wrong) > 5:
            rows.append(("and", f"{len(wrong) - 5} more"))
        if strict:
            rows += [("missing", _some(missing))] * bool(missing) + [("unexpected", _some(unexpected))] * bool(
                unexpected
            )
        raise CheckpointError(explain(f"{checkpoint.folder} does not fit the {part}.", [*rows, UNCHANGED]))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
