"""Whether a checkpoint is what was written: every byte of every file, and whether the parts make up the whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from colonnade.checkpoint.file_sum import check_sum
from colonnade.checkpoint.manifest import Manifest, read_manifest
from colonnade.checkpoint.root import LATEST, find_checkpoint, steps_in
from colonnade.checkpoint.tensor_file import TensorFile
from colonnade.checkpoint.tensor_header import KINDS, SUFFIX
from colonnade.errors import CheckpointError


def verify(path: str | Path, all_steps: bool = False, told: Callable[[str], None] = lambda _: None) -> list[str]:
    """What is wrong, in words; an empty list where nothing is.

    Args:
        path: a folder of checkpoints, of which the latest is looked at, or the folder of one.
        all_steps: look at all checkpoints of the folder.
        told: called with the name of each file before it is read.

    Raises:
        CheckpointError: there is none.
    """
    root = Path(os.path.realpath(path))
    folders = list(steps_in(root).values()) if all_steps else []
    problems = [problem for folder in folders or [find_checkpoint(path)] for problem in _problems(folder, told)]
    if (root / LATEST).is_file():
        named = (root / LATEST).read_text(encoding="utf-8", errors="replace").rstrip("\n")
        if root / named not in steps_in(root).values():
            problems.append(f"{root / LATEST} names {named!r}, which is no checkpoint in this folder.")
    return problems


def _problems(folder: Path, told: Callable[[str], None]) -> list[str]:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for name, expected in manifest.files.items():
        told(name)
        try:
            check_sum(folder / name, expected, thorough=True)
            if name.endswith(SUFFIX):
                problems += _contents(folder, name, manifest)
        except CheckpointError as error:
            problems.append(str(error))
    problems += [f"no file has all of {key}." for key, tensor in manifest.tensors.items() if not tensor.is_complete]
    return problems


def _contents(folder: Path, name: str, manifest: Manifest) -> list[str]:
    """What the header of a file says, against the manifest."""
    problems = []
    with TensorFile(folder / name) as opened:
        for key, tensor in manifest.tensors.items():
            for chunk in tensor.chunks:
                entry = opened.entries.get(chunk.key)
                if chunk.file == name and (entry is None or (entry.shape, entry.dtype) != (chunk.extent, tensor.dtype)):
                    found = "nothing" if entry is None else f"{KINDS[entry.dtype]} {entry.shape}"
                    problems.append(
                        f"{folder / name}: {key} should be {KINDS[tensor.dtype]} {chunk.extent}, and is {found}."
                    )
    return problems
