"""load_model: each rank reads, from an ordinary Hugging Face folder, the slices of its own boxes.

A load has two halves. First every rank reads the headers of all files and matches keys with the model's tensors; what
does not fit is exchanged, and all ranks raise before any weight has changed. Then values are copied into the memory that
the parameters have already: objects, ties and optimizer references stay.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colonnade.checkpoint.agreement import Attempt
from colonnade.checkpoint.hub_folder import has_weights, read_headers
from colonnade.checkpoint.hub_match import Converted, match_keys, problem_rows
from colonnade.checkpoint.model_tensors import named_tensors
from colonnade.checkpoint.staged_folder import locate
from colonnade.checkpoint.tensor_file import TensorFile
from colonnade.checkpoint.transformers_internals import LoadRules
from colonnade.cluster.mesh import ParallelMesh
from colonnade.errors import CheckpointError, explain
from colonnade.model.layout import layout_of, local_of
from colonnade.model.pieces import pieces_of

log = logging.getLogger(__name__)
UNCHANGED = ("left", "the model as it was: no weight has been changed")


@dataclass(frozen=True)
class LoadReport:
    """What a load has done.

    Args:
        folder: the folder that was read: the one asked for, or what an interrupted save had left beside it.
        loaded: number of tensors of this rank that got a value.
        bytes_read: bytes of the weights that this rank has taken from the files.
        missing: names in the model without a value in the folder, on any rank.
        unexpected: keys in the folder that no rank has a place for.
    """

    folder: str
    loaded: int
    bytes_read: int
    missing: tuple[str, ...] = field(default=())
    unexpected: tuple[str, ...] = field(default=())


def load_model(
    model: nn.Module, path: str | os.PathLike[str], mesh: ParallelMesh, *, strict: bool = True
) -> LoadReport:
    """Load a folder in Hugging Face hub format into a model whose parameters may be shards.

    Called by every rank. Reads safetensors folders written by save_model, by transformers' save_pretrained or found on
    the hub, of the same model or of its base model. Values are cast to the parameters' dtypes.

    Traffic: two exchanges of status; no weights travel between ranks.

    Args:
        model: the model; its parameters keep their identity and their memory.
        path: the folder; every rank reads it.
        strict: raise where names are missing or unexpected; otherwise they are only reported. Shapes must agree always.

    Returns:
        What was read.

    Raises:
        CheckpointError: on every rank, where a file is missing or damaged or does not fit the model: then no weight has
            changed; or where reading fails later on: then the error says that the weights are a mixture.
    """
    attempt = Attempt(mesh, f"the model was not loaded from {os.fspath(path)}.", (UNCHANGED,))
    folder, reader = Path(), None
    with attempt:
        folder = locate(path, has_weights)
        reader = _Reader(model, folder)
    missing, unexpected = _check(attempt.agree(reader and reader.findings), path, strict)
    if folder.name != Path(os.path.realpath(path)).name and mesh.world.rank == 0:
        log.warning("%s is what an interrupted save has left; it is complete and is loaded for %s.", folder, path)

    mixed = ("left", "the weights of this model are a mixture now: load again before using it")
    attempt = Attempt(mesh, f"reading {folder} failed in the middle of a load.", (mixed,))
    assert reader is not None  # else the exchange above has raised
    with attempt:
        reader.copy()
    attempt.agree()
    return LoadReport(str(folder), reader.loaded, reader.bytes_read, missing, unexpected)


@dataclass(frozen=True)
class _Findings:
    """What one rank tells the others after it has read the headers; `source` must be the same for all."""

    source: str
    missing: list[str]
    unexpected: list[str]
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]]


def _check(findings: list[_Findings], path: Any, strict: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Join what the ranks found, the same way on each of them.

    Returns:
        Missing and unexpected names.
    """
    if len({found.source for found in findings}) > 1:
        rows = [(f"rank {rank}", found.source) for rank, found in enumerate(findings)]
        raise CheckpointError(explain(f"the ranks see different files at {path}.", [*rows, UNCHANGED]))
    missing = tuple(dict.fromkeys(name for found in findings for name in found.missing))
    # A key is unexpected where it is so for every rank: a pipeline stage has no place for the keys of another.
    everywhere = set.intersection(*(set(found.unexpected) for found in findings))
    unexpected = tuple(key for key in findings[0].unexpected if key in everywhere)
    mismatched = list(dict.fromkeys(row for found in findings for row in found.mismatched))
    if mismatched or (strict and (missing or unexpected)):
        rows = problem_rows(missing if strict else (), unexpected if strict else (), mismatched)
        raise CheckpointError(explain(f"{path} does not fit the model.", [*rows, UNCHANGED]))
    return missing, unexpected


class _Reader:
    """Reads stored values to where they belong; of what the model has in another form, one group is in memory at a time."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self.stored = read_headers(folder)
        self.rules = LoadRules(model)
        self.match = match_keys(named_tensors(model), self.stored, self.rules)
        self.loaded = self.bytes_read = 0
        headers = repr(sorted((key, entry.file.name, entry.shape, entry.dtype) for key, entry in self.stored.items()))
        source = f"{folder.name}, headers {hashlib.sha256(headers.encode()).hexdigest()[:12]}"
        self.findings = _Findings(source, self.match.missing, self.match.unexpected, self.match.mismatched)

    @torch.no_grad()
    def copy(self) -> None:
        """Fill every tensor that has a value in the folder."""
        by_file: dict[Path, list[tuple[str, torch.Tensor]]] = {}
        for key, tensor in self.match.direct:
            by_file.setdefault(self.stored[key].file, []).append((key, tensor))
        for file, entries in by_file.items():
            with TensorFile(file) as opened:
                for key, tensor in sorted(entries, key=lambda entry: opened.entries[entry[0]].start):
                    self._fill(tensor, functools.partial(self._read, opened, key))
        for group in self.match.converted:
            self._fill_converted(group)

    def _fill_converted(self, group: Converted) -> None:
        """Read all parts of a conversion whole, convert, and keep the boxes."""
        parts = []
        for key, pattern in group.parts:
            with TensorFile(self.stored[key].file) as opened:
                whole = torch.empty(opened.entries[key].shape, dtype=opened.entries[key].dtype)
                self._read(opened, key, (0,) * whole.dim(), whole)
            parts.append((key, pattern, whole))
        made = self.rules.convert(group.name, parts)
        for name, tensor in group.targets.items():
            self._fill(tensor, functools.partial(_copy_box, made[name]))

    def _read(self, opened: TensorFile, key: str, start: tuple[int, ...], target: torch.Tensor) -> None:
        opened.read(key, start, target)
        self.bytes_read += target.numel() * opened.entries[key].dtype.itemsize

    def _fill(self, tensor: torch.Tensor, read: Callable[[tuple[int, ...], torch.Tensor], None]) -> None:
        """Fill the boxes of a local tensor; what lies outside them, such as padding, stays as it is."""
        for start, target in pieces_of(local_of(tensor.detach()), layout_of(tensor)):
            read(start, target)
        self.loaded += 1


def _copy_box(whole: torch.Tensor, start: tuple[int, ...], target: torch.Tensor) -> None:
    target.copy_(whole[tuple(slice(s, s + n) for s, n in zip(start, target.shape))])
