"""A folder that is replaced as a whole or not at all (Note: nothing is written over a checkpoint).

[Note: the steps of a commit]
Beside the target `model/` three hidden names are used, all on its file system so that a rename is atomic:
    .model.saving-<host>-<pid>-<unique>   being written; after a crash no checkpoint, and removed by the next save
    .model.finished                       complete and on disk, not yet in place
    .model.previous                       the earlier checkpoint, while the finished one takes its place
A commit renames saving → finished, target → previous, finished → target, and removes previous. The target is missing
only between the second and the third rename; a reader then takes `.finished`, else `.previous`, and the next save
completes the interrupted commit before it begins.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import uuid
from collections.abc import Callable
from pathlib import Path

from colonnade.errors import CheckpointError, explain


class StagedFolder:
    """Where one save writes, and how it takes the place of what was there.

    Args:
        path: the folder to make or to replace; a symbolic link stands for the folder it points to.
        recognise: whether a folder's contents are a checkpoint of this kind, and so may be replaced.
        replaced: pattern of file names that belong to the checkpoint; every other file of an earlier folder is kept.
    """

    def __init__(
        self, path: str | os.PathLike[str], recognise: Callable[[Path], bool], replaced: re.Pattern[str]
    ) -> None:
        self.target = Path(os.path.realpath(path))
        self.recognise, self.replaced = recognise, replaced
        self.finished, self.previous = _sibling(self.target, "finished"), _sibling(self.target, "previous")
        unique = f"saving-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.staging = _sibling(self.target, unique)

    def open(self) -> Path:
        """Check the target, clear what dead saves have left, and return the empty folder to write into.

        Raises:
            CheckpointError: where the target is something that a save must not replace.
            OSError: where the folder cannot be made.
        """
        self._check_target()
        os.makedirs(self.target.parent, exist_ok=True)
        self._complete_interrupted_commit()
        for leftover in _unfinished(self.target):
            if not is_being_written(leftover):
                shutil.rmtree(leftover)
        self.staging.mkdir()
        return self.staging

    def _check_target(self) -> None:
        target = self.target
        if os.path.ismount(target) or Path.cwd().is_relative_to(target):
            what = "is a mount point" if os.path.ismount(target) else "contains the working folder of this process"
            raise CheckpointError(
                explain(
                    f"{target} {what}, and a checkpoint is put in place by renaming its folder.",
                    [("try", f"a folder inside it: {target / 'model'}")],
                )
            )
        if target.exists() and not target.is_dir():
            raise CheckpointError(
                explain(f"{target} is a file.", [("needs", "a folder, or a path that does not exist yet")])
            )
        if has_entries(target) and not self.recognise(target):
            names = sorted(os.listdir(target))
            raise CheckpointError(
                explain(
                    f"{target} is not empty and does not hold a checkpoint of this kind.",
                    [
                        ("found", ", ".join(names[:5]) + (", …" if len(names) > 5 else "")),
                        ("try", f"a new folder: {target / 'model'}"),
                    ],
                )
            )

    def _complete_interrupted_commit(self) -> None:
        for complete in (self.finished, self.previous):
            if complete.exists() and not has_entries(self.target):
                os.rename(complete, self.target)  # POSIX lets it take the place of an empty folder
            elif complete.exists():
                shutil.rmtree(complete)

    def commit(self, keep_previous: bool = False) -> list[Path]:
        """Put the written folder in the target's place, with the files of the earlier one that are not replaced.

        Args:
            keep_previous: leave it to the caller to remove the earlier folder.

        Returns:
            The earlier folder under its hidden name, where it was left.

        Raises:
            OSError: where a step fails; the earlier folder is then in its place again.
        """
        if self.target.is_dir():
            self._keep_other_files()
        _sync_tree(self.staging)
        os.rename(self.staging, self.finished)
        try:
            self._exchange()
        except BaseException:
            os.rename(self.finished, self.staging)
            raise
        sync(self.target.parent)
        # The new checkpoint is in place: what cannot be removed now is left to the next save.
        if keep_previous:
            return [self.previous] if self.previous.is_dir() else []
        shutil.rmtree(self.previous, ignore_errors=True)
        return []

    def _exchange(self) -> None:
        replaces = has_entries(self.target)
        if replaces:
            os.rename(self.target, self.previous)
        try:
            os.rename(self.finished, self.target)
        except BaseException:
            if replaces:
                os.rename(self.previous, self.target)
            raise

    def _keep_other_files(self) -> None:
        shutil.copymode(self.target, self.staging)
        for old in self.target.iterdir():
            new = self.staging / old.name
            if os.path.lexists(new) or self.replaced.fullmatch(old.name):
                continue
            if old.is_dir() and not old.is_symlink():
                shutil.copytree(old, new, symlinks=True, copy_function=_link_or_copy)
            else:
                _link_or_copy(old, new)

    def discard(self) -> None:
        """Remove what was written and not committed. Does nothing after a commit."""
        # Called while an error is on its way, which must not be hidden by one of tidying up.
        shutil.rmtree(self.staging, ignore_errors=True)


def locate(path: str | os.PathLike[str], recognise: Callable[[Path], bool]) -> Path:
    """The folder to read for `path`: itself, or what an interrupted commit left beside it.

    Raises:
        CheckpointError: where there is neither.
    """
    target = Path(os.path.realpath(path))
    candidates = (target, _sibling(target, "finished"), _sibling(target, "previous"))
    for folder in candidates:
        if folder.is_dir() and recognise(folder):
            return folder
    state = "is empty" if target.is_dir() and not has_entries(target) else "holds no checkpoint of this kind"
    state = state if target.exists() else "does not exist"
    rows = [("found", ", ".join(sorted(os.listdir(target))[:5]))] if has_entries(target) else []
    rows += [
        ("unfinished", f"{folder.name}: a save that did not complete; not usable") for folder in _unfinished(target)
    ]
    raise CheckpointError(explain(f"{target} {state}.", rows))


def has_entries(folder: Path) -> bool:
    """Whether `folder` is a folder that is not empty."""
    return folder.is_dir() and any(folder.iterdir())


def _unfinished(target: Path) -> list[Path]:
    """Folders that saves to this target are writing, or were when they died."""
    if not target.parent.is_dir():
        return []
    start = _sibling(target, "saving-").name
    return sorted(entry for entry in target.parent.iterdir() if entry.name.startswith(start))


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            file = Path(root, name)
            if file.is_file() and not file.is_symlink():
                sync(file)
        sync(Path(root))


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sibling(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{suffix}")


def is_being_written(staging: Path) -> bool:
    """Whether the process named in a staging folder's name is another one that runs on this machine."""
    match = re.search(r"\.saving-(.+)-(\d+)-[0-9a-f]{8}$", staging.name)
    if match is None or match[1] != socket.gethostname() or int(match[2]) == os.getpid():
        return False
    try:
        os.kill(int(match[2]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs, as somebody else
        return True
    return True


def _link_or_copy(old: str | Path, new: str | Path) -> None:
    """The same file under a second name, or a copy where the file system has no hard links."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copy2(old, new, follow_symlinks=False)
