"""Checkpoints in stores that fsspec knows (object stores and the like): their paths have "://" in them.

[Note: without renames]
Such stores cannot rename a folder. So every save gets a folder of a name of its own, its manifest is the last file that is
put there, and then `latest` is replaced by one that names it. A folder without a manifest is no checkpoint, and is removed
by the next save. Files are written and read through a folder on this machine, each by the rank that needs it.
"""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from pathlib import Path

from colonnade.checkpoint.manifest import MANIFEST
from colonnade.checkpoint.root import LATEST
from colonnade.errors import CheckpointError, explain

_STEP = re.compile(r"step-(\d{8,})-[0-9a-f]{8}")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is that of a store."""
    return "://" in os.fspath(path)


class RemoteFolder:
    """A folder of checkpoints in a store, and this rank's copies of files.

    Args:
        path: with "://".

    Raises:
        CheckpointError: the package for such stores is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            from fsspec.core import url_to_fs

            self.files, self.root = url_to_fs(os.fspath(path))
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                explain(
                    f"{path} cannot be reached.",
                    [
                        ("reason", str(error)),
                        ("try", "pip install fsspec, and the package that it names for such a store"),
                    ],
                )
            ) from error
        self._copies = tempfile.TemporaryDirectory(prefix="colonnade-remote-")

    @property
    def local(self) -> Path:
        """Where this rank has its copies."""
        return Path(self._copies.name)

    def new_name(self, step: int) -> str:
        """Name of a checkpoint that is not there yet."""
        return f"step-{step:08d}-{uuid.uuid4().hex[:8]}"

    def put(self, name: str, file: str) -> None:
        """Put a file, or a folder of them, from where this rank has it into a checkpoint."""
        there = f"{self.root}/{name}/{file}"
        if (self.local / file).is_dir():
            self.files.makedirs(there, exist_ok=True)
            for each in sorted((self.local / file).iterdir()):
                self.files.put_file(str(each), f"{there}/{each.name}")
        else:
            self.files.makedirs(f"{self.root}/{name}", exist_ok=True)
            self.files.put_file(str(self.local / file), there)

    def get(self, name: str, file: str) -> Path:
        """A file of a checkpoint, on this machine.

        Raises:
            CheckpointError: naming it, where it is missing.
        """
        there, here = f"{self.root}/{name}/{file}" if name else f"{self.root}/{file}", self.local / file
        if not here.exists():
            here.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.files.get_file(there, str(here))
            except OSError as error:
                raise CheckpointError(f"{there} cannot be read: {error}") from error
        return here

    def size(self, name: str, file: str) -> int:
        """Length of a file of a checkpoint, in bytes; -1 where it is missing."""
        try:
            return int(self.files.size(f"{self.root}/{name}/{file}"))
        except OSError:
            return -1

    def head(self, name: str, file: str, start: int, stop: int) -> bytes:
        """A part of a file."""
        return bytes(self.files.cat_file(f"{self.root}/{name}/{file}", start=start, end=stop))

    def names(self) -> list[str]:
        """All folders of checkpoints, whole or not, the latest step last."""
        if not self.files.exists(self.root):
            return []
        found = {Path(entry).name for entry in self.files.ls(self.root, detail=False)}
        return sorted(name for name in found if _STEP.fullmatch(name))

    def is_whole(self, name: str) -> bool:
        return bool(self.files.exists(f"{self.root}/{name}/{MANIFEST}"))

    def find(self) -> str:
        """Name of the checkpoint that is meant: the one that `latest` names; empty where the path is that of one itself.

        Raises:
            CheckpointError: there is none.
        """
        self.files.invalidate_cache()
        if self.files.exists(f"{self.root}/{MANIFEST}"):
            return ""
        whole = [name for name in self.names() if self.is_whole(name)]
        if self.files.exists(f"{self.root}/{LATEST}"):
            named = self.files.cat_file(f"{self.root}/{LATEST}").decode().strip()
            if named in whole:
                return named
        if not whole:
            raise CheckpointError(f"{self.root} holds no training checkpoint.")
        return whole[-1]

    def set_latest(self, name: str) -> None:
        """Let `latest` name a checkpoint that is whole."""
        self.files.pipe_file(f"{self.root}/{LATEST}", f"{name}\n".encode())

    def clear(self) -> None:
        """Remove what saves that died have left."""
        self.files.invalidate_cache()
        for name in self.names():
            if not self.is_whole(name):
                self.files.rm(f"{self.root}/{name}", recursive=True)

    def remove_old(self, keep_last: int | None, latest: str) -> None:
        """Remove all but the last checkpoints, and earlier ones of the same step: their manifests first."""
        step = latest.rpartition("-")[0]
        others = [name for name in self.names() if name != latest]
        gone = [name for name in others if name.rpartition("-")[0] == step]
        others = [name for name in others if name not in gone]
        if keep_last is not None:
            gone += others[: max(0, len(others) - (keep_last - 1))]
        for name in gone:
            self.files.rm_file(f"{self.root}/{name}/{MANIFEST}")
            self.files.rm(f"{self.root}/{name}", recursive=True)
