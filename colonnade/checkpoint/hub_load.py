"""load_model: each rank reads, from an ordinary Hugging Face folder, the slices of its own boxes.

A load has two halves. First every rank reads the headers of all files and matches keys with the model's tensors; what
does not fit is exchanged, and all ranks raise before any weight has changed. Then values are copied into the memory that
the parameters have already: objects, ties and optimizer references stay.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from colonnade.checkpoint.agreement import Attempt
from colonnade.checkpoint.hub_folder import has_weights, open_weights, read_headers
from colonnade.checkpoint.hub_match import Converted, match_keys, problem_rows
from colonnade.checkpoint.model_tensors import named_tensors
from colonnade.checkpoint.staged_folder import locate
from colonnade.checkpoint.transformers_internals import LoadRules
from colonnade.cluster.mesh import ParallelMesh
from colonnade.errors import CheckpointError, explain
from colonnade.model.layout import layout_of, local_of

log = logging.getLogger(__name__)
MAPPED_BYTES = 64 * 2**20  # of a file, before it is closed and opened again
UNCHANGED = ("left", "the model as it was: no weight has been changed")


@dataclass(frozen=True)
class LoadReport:
    """What a load has done.

    Args:
        folder: the folder that was read: the one asked for, or what an interrupted save had left beside it.
        loaded: number of tensors of this rank that got a value.
        bytes_read: bytes of weights this rank has read.
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
    """Copies stored values into local tensors, one file open at a time for what is stored as it is in the model."""

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
        for file, entries in self._runs():
            with _naming(file), open_weights(file) as opened:
                for key, tensor in entries:
                    self._copy_boxes(tensor, functools.partial(self._read, opened, key))
        for group in self.match.converted:
            self._copy_converted(group)

    def _runs(self) -> Iterator[tuple[Path, list[tuple[str, torch.Tensor]]]]:
        """What to read while a file is open once: files are mapped, and what was touched stays until it is closed."""
        by_file: dict[Path, list[tuple[str, torch.Tensor]]] = {}
        for key, tensor in self.match.direct:
            by_file.setdefault(self.stored[key].file, []).append((key, tensor))
        for file, entries in by_file.items():
            run: list[tuple[str, torch.Tensor]] = []
            mapped = 0
            for key, tensor in entries:
                nbytes = math.prod(self.stored[key].shape) * tensor.element_size()
                if run and mapped + nbytes > MAPPED_BYTES:
                    yield file, run
                    run, mapped = [], 0
                run.append((key, tensor))
                mapped += nbytes
            yield file, run

    def _copy_converted(self, group: Converted) -> None:
        """Read all parts of a conversion whole, convert, and keep the boxes; one group in memory at a time."""
        parts = []
        for key, pattern in group.parts:
            file = self.stored[key].file
            with _naming(file), open_weights(file) as opened:
                parts.append((key, pattern, self._read(opened, key, None)))
        made = self.rules.convert(group.name, parts)
        for name, tensor in group.targets.items():
            self._copy_boxes(tensor, functools.partial(_slice, made[name]))

    def _read(self, opened: Any, key: str, slices: tuple[slice, ...] | None) -> torch.Tensor:
        value = opened.get_tensor(key) if slices is None else opened.get_slice(key)[slices]
        self.bytes_read += value.nbytes
        return value

    def _copy_boxes(self, tensor: torch.Tensor, read: Callable[[tuple[slice, ...] | None], torch.Tensor]) -> None:
        """Fill the boxes of a local tensor; what lies outside them, such as padding, stays as it is."""
        local, layout = local_of(tensor.detach()), layout_of(tensor)
        for box in layout.boxes:
            if math.prod(box.extent):
                local[box.local_slices].copy_(read(None if box.extent == layout.shape else box.logical_slices))
        self.loaded += 1


def _slice(whole: torch.Tensor, slices: tuple[slice, ...] | None) -> torch.Tensor:
    return whole if slices is None else whole[slices]


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Name the file in whatever goes wrong while it is read."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
