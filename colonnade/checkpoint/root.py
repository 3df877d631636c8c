"""A folder of training checkpoints: one for each saved step, and a file that names the latest whole one.

[Note: what a reader sees]
`step-00000300/` is put in place by renames when all of it is on disk (`staged_folder.py`); then the file `latest` is replaced,
which is one rename too. Whenever a job dies, `latest` names a checkpoint that is whole. What is superseded is renamed to a
hidden name before it is removed, so that nothing half removed is taken for a checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path

from colonnade.checkpoint.manifest import MANIFEST
from colonnade.checkpoint.staged_folder import is_being_written, locate, sync
from colonnade.errors import CheckpointError, explain

LATEST = "latest"
FILES = re.compile(r"rank-\d+-of-\d+\.safetensors|state\.pt|" + re.escape(MANIFEST))
_STEP = re.compile(r"step-(\d{8,})")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a training checkpoint."""
    return (folder / MANIFEST).is_file()


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"step-{step:08d}"


def steps_in(root: Path) -> dict[int, Path]:
    """The checkpoints in a folder, by step, those of interrupted replacements included; the latest step last."""
    found = {}
    for entry in os.listdir(root) if root.is_dir() else ():
        match = _STEP.search(entry)
        if match and entry in (match[0], f".{match[0]}.finished", f".{match[0]}.previous"):
            folder = root / match[0]
            if any(is_checkpoint(p) for p in (folder, root / f".{match[0]}.finished", root / f".{match[0]}.previous")):
                found[int(match[1])] = folder
    return dict(sorted(found.items()))


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that is meant by a path: itself, or the latest one in it.

    Raises:
        CheckpointError: there is none.
    """
    if "://" in os.fspath(path):
        raise CheckpointError(
            f"{path} is a path of a store; what is asked for needs a folder of this machine: copy it."
        )
    root = Path(os.path.realpath(path))
    if is_checkpoint(root) or not root.is_dir():
        return locate(root, is_checkpoint)
    steps = steps_in(root)
    named = _named_latest(root)
    if named is not None and named in steps.values():
        return locate(named, is_checkpoint)
    if steps:
        return locate(list(steps.values())[-1], is_checkpoint)
    return _interrupted(root)


def _interrupted(root: Path) -> Path:
    """A checkpoint whose own folder was being replaced, or an error that says what is there instead."""
    try:
        return locate(root, is_checkpoint)
    except CheckpointError as error:
        rows = [("needs", f"{MANIFEST}, or folders step-…, as booster.save writes them")]
        if (root / "config.json").is_file():
            rows.append(("found", "a model in the hub's format: booster.load_model(model, path) loads it"))
        raise CheckpointError(explain(str(error), rows)) from None


def _named_latest(root: Path) -> Path | None:
    try:
        return root / (root / LATEST).read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except OSError:
        return None


def set_latest(root: Path, folder: Path) -> None:
    """Let `latest` name a checkpoint that is in place."""
    beside = root / f".{LATEST}.{uuid.uuid4().hex[:8]}"
    try:
        beside.write_text(f"{folder.name}\n", encoding="utf-8")
        sync(beside)
        os.replace(beside, root / LATEST)
    finally:
        beside.unlink(missing_ok=True)
    sync(root)


def clear(root: Path) -> None:
    """Remove what saves and removals that died have left."""
    for entry in root.glob(".step-*.removed-*"):
        shutil.rmtree(entry, ignore_errors=True)
    for entry in root.glob(".step-*.saving-*"):
        if not is_being_written(entry):
            shutil.rmtree(entry, ignore_errors=True)
    for entry in [*root.glob(".step-*.previous"), *root.glob(".step-*.finished")]:
        if is_checkpoint(root / entry.name[1:].rpartition(".")[0]):  # else it is what a reader takes in its place
            shutil.rmtree(entry, ignore_errors=True)
    for entry in root.glob(f".{LATEST}.*"):
        entry.unlink(missing_ok=True)


def take_out_old(root: Path, keep_last: int | None, latest: Path) -> list[Path]:
    """Rename all but the last checkpoints to hidden names; these, to be removed."""
    if keep_last is None:
        return []
    older, gone = [folder for folder in steps_in(root).values() if folder != latest], []
    for folder in older[: max(0, len(older) - (keep_last - 1))]:
        gone.append(folder.with_name(f".{folder.name}.removed-{uuid.uuid4().hex[:8]}"))
        os.rename(folder, gone[-1])
    return gone
