"""Manifest: what a training checkpoint says of itself. A small JSON file, written last; a folder without it is none.

A tensor is known by what it is (a weight of the model, or what the optimizer keeps for one) and by its logical name. It lies
in chunks, boxes of the logical tensor, each in some file; how many ranks wrote them, and how the model was split, is of no
importance to who reads it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from colonnade.checkpoint.file_sum import FileSum
from colonnade.checkpoint.hub_plan import covers
from colonnade.checkpoint.tensor_header import DTYPES, KINDS
from colonnade.errors import CheckpointError, explain
from colonnade.model.layout import Box

MANIFEST = "checkpoint.json"
FORMAT, VERSION = "colonnade", 1


class Key(NamedTuple):
    """Which tensor it is.

    Args:
        part: "model" or "optimizer".
        name: the parameter's or buffer's, in the model's state dict; the first where it has several.
        state: what the optimizer keeps, by its own key ("exp_avg"); empty for a weight.
    """

    part: str
    name: str
    state: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.state}" if self.state else self.name


class Chunk(NamedTuple):
    """A box of a logical tensor in a file."""

    file: str
    key: str
    offset: tuple[int, ...]
    extent: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A logical tensor, and where it lies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_complete(self) -> bool:
        """Whether the chunks leave no entry out."""
        return covers(self.shape, [Box(chunk.offset, chunk.offset, chunk.extent) for chunk in self.chunks])


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint holds.

    Args:
        step: the user's count of steps.
        tensors: where each lies.
        names: first name → all names of a tied weight.
        files: lengths and check sums.
        numbers: name of a parameter → key → what the optimizer keeps for it as one number.
        parts: what it holds: "model", "optimizer", "lr_scheduler", "dataloader", "random", "extra".
        about: how it was made, for people: layout, optimizer, versions.
    """

    step: int
    tensors: Mapping[Key, StoredTensor]
    names: Mapping[str, tuple[str, ...]]
    files: Mapping[str, FileSum]
    parts: tuple[str, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of_part(self, part: str) -> dict[Key, StoredTensor]:
        """The tensors of the model, or of the optimizer."""
        return {key: tensor for key, tensor in self.tensors.items() if key.part == part}

    def write(self, folder: Path) -> None:
        """Write it into a folder, with a check sum of itself."""
        content = self._as_json()
        (folder / MANIFEST).write_text(_text(content | {"crc": _crc(content)}), encoding="utf-8")

    def _as_json(self) -> dict[str, Any]:
        files = list(self.files)
        places = {name: number for number, name in enumerate(files)}
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "parts": self.parts,
            "about": dict(self.about),
            "files": [[name, found.nbytes, found.digest] for name, found in self.files.items()],
            "numbers": {name: dict(found) for name, found in self.numbers.items()},
            "names": [list(names) for names in self.names.values() if len(names) > 1],
            "tensors": [
                [*key, KINDS[t.dtype], t.shape, [[places[c.file], c.key, c.offset, c.extent] for c in t.chunks]]
                for key, t in self.tensors.items()
            ],
        }


def _text(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=True)


def _crc(content: Any) -> str:
    return f"{zlib.crc32(_text(content).encode()):08x}"


def _checked(text: str) -> Any:
    """The content of a manifest, if it is what was written, byte by byte.

    Raises:
        ValueError: it is not.
    """
    content = json.loads(text)
    if content["format"] != FORMAT:
        raise ValueError(f'it says format "{content["format"]}", not "{FORMAT}"')
    if _text(content) != text or content.pop("crc") != _crc(content):
        raise ValueError("it is damaged: its check sum is another")
    return content


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: naming the file, where it is missing, unreadable, or of a newer format than this version knows.
    """
    file = folder / MANIFEST
    try:
        found = _checked(file.read_text(encoding="utf-8"))
        version = int(found["version"])
        if version <= VERSION:
            return _from_json(found)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        reason = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{file} is no manifest of a training checkpoint: {reason}") from error
    raise CheckpointError(
        explain(
            f"{file} is of a newer format than this version of colonnade reads.",
            [("found", f"version {version}"), ("reads", f"up to {VERSION}"), ("try", "a newer colonnade")],
        )
    )


def _from_json(found: Any) -> Manifest:
    files = [name for name, *_ in found["files"]]
    return Manifest(
        int(found["step"]),
        {
            Key(part, name, state): StoredTensor(
                tuple(shape), DTYPES[kind], tuple(Chunk(files[f], k, tuple(o), tuple(e)) for f, k, o, e in chunks)
            )
            for part, name, state, kind, shape, chunks in found["tensors"]
        },
        {names[0]: tuple(names) for names in found["names"]},
        {name: FileSum(nbytes, digest) for name, nbytes, digest in found["files"]},
        tuple(found["parts"]),
        found["about"],
        found["numbers"],
    )


@dataclass(frozen=True)
class Announced:
    """A chunk that a rank has written.

    Args:
        shape, dtype: of the logical tensor.
    """

    tensor: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunk: Chunk


def collect(announced: Iterable[Announced]) -> dict[Key, StoredTensor]:
    """What all ranks have written, by tensor.

    Raises:
        CheckpointError: ranks speak of different shapes or formats, or the chunks leave entries out.
    """
    chunks: dict[Key, list[Chunk]] = {}
    about: dict[Key, tuple[tuple[int, ...], torch.dtype]] = {}
    for each in announced:
        said = (each.shape, each.dtype)
        if about.setdefault(each.tensor, said) != said:
            raise CheckpointError(f"ranks hold {each.tensor} as {about[each.tensor]} and as {said}.")
        chunks.setdefault(each.tensor, []).append(each.chunk)
    found = {key: StoredTensor(*about[key], tuple(sorted(set(chunks[key])))) for key in chunks}
    lost = [key for key, tensor in found.items() if not tensor.is_complete]
    if lost:
        raise CheckpointError(
            explain(f"the ranks together do not hold all of {lost[0]}.", [("others", f"{len(lost) - 1}")])
        )
    return found
