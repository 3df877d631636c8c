"""A training checkpoint is written: each rank a file of its share, then one rank puts the folder in place.

[Note: two halves]
The first half takes what belongs to this moment, and needs the training to stand still: views of tensors, or for a save in
the background copies of them. The second half writes, and talks to the other ranks over whatever axis it is given; it can
go on beside the training if that is one of its own.
"""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from colonnade.checkpoint.agreement import Attempt, agree
from colonnade.checkpoint.file_sum import FileSum, checksum
from colonnade.checkpoint.manifest import MANIFEST, Announced, Chunk, Key, Manifest, collect
from colonnade.checkpoint.remote import RemoteFolder, is_remote
from colonnade.checkpoint.root import FILES, clear, folder_of, is_checkpoint, set_latest, take_out_old
from colonnade.checkpoint.spread import own_pieces
from colonnade.checkpoint.staged_folder import StagedFolder, sync
from colonnade.checkpoint.tensor_file import TensorFile, write_tensors
from colonnade.checkpoint.tensor_header import Entry, parse_header
from colonnade.checkpoint.training_items import Group, Items, merge_groups, merge_numbers
from colonnade.cluster.mesh import Axis, ParallelMesh
from colonnade.errors import CheckpointError, explain

WRITER = 0  # global rank
OBJECTS = "state.pt"
CONFIG = "model"  # folder with the model's config
Header = tuple[dict[str, str], dict[str, Entry]]
UNCHANGED = ("left", "no trace of this save; what was saved before is unchanged")


@dataclass
class Snapshot:
    """What a rank writes, as it is at one moment.

    Args:
        step: the user's count of steps.
        tensors: this rank's share, by the key in its file.
        chunks: for each of them, which tensor it is a part of, that one's shape, and where it begins in it.
        items: names and numbers.
        objects: Python objects of the checkpoint, the same on every rank.
        own: Python objects of this rank.
        parts: what the checkpoint holds.
        about: how it was made.
        write_config: writes the model's config into a folder, so that the weights can be exported without the program.
    """

    step: int
    tensors: dict[str, torch.Tensor]
    chunks: dict[str, tuple[Key, tuple[int, ...], tuple[int, ...]]]
    items: Items
    objects: dict[str, Any]
    own: dict[str, Any]
    parts: tuple[str, ...]
    about: dict[str, Any] = field(default_factory=dict)
    write_config: Callable[[Path], None] | None = None

    def copy(self) -> Snapshot:
        """Put the tensors into memory of their own, on the host, so that training can go on."""
        self.tensors = {key: tensor.to("cpu", copy=True) for key, tensor in self.tensors.items()}
        self.objects, self.own, self.items.groups = _copied((self.objects, self.own, self.items.groups))
        self.items.shards = {}  # they are what training goes on with
        return self


def take_snapshot(
    items: Items,
    mesh: ParallelMesh,
    stages: Mapping[Key, Sequence[int]],
    step: int,
    objects: dict[str, Any],
    own: dict[str, Any],
    parts: tuple[str, ...],
) -> Snapshot:
    """Choose what this rank writes.

    Args:
        stages: which ranks of "pp" hold each tensor; empty without a pipeline.
    """
    tensors: dict[str, torch.Tensor] = {}
    chunks = {}
    for key, shards in items.shards.items():
        for offset, tensor in own_pieces(key, shards, mesh, stages.get(key, (0,))):
            where = ",".join(map(str, offset))
            text = f"{key.part}/{key.name}" + (f"/{key.state}" if key.state else "") + f"@{where}"
            tensors[text], chunks[text] = tensor.detach(), (key, shards[0].shape, offset)
    about = {
        "layout": repr(mesh),
        "ranks": mesh.world_size,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return Snapshot(step, tensors, chunks, items, objects, own, parts, about)


def _copied(objects: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(objects, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # written a moment ago by this process


def save_training(
    snapshot: Snapshot, path: str | os.PathLike[str], world: Axis, *, keep_last: int | None, in_root: bool = True
) -> Path:
    """Write a snapshot and commit it. All ranks call it, with their own.

    Args:
        path: a folder of checkpoints; or, if not `in_root`, the folder of this one.
        world: all ranks; what is exchanged goes over it.
        keep_last: so many checkpoints are left in the folder; None for all.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: on every rank, where one fails; what was saved before is whole and unchanged.
    """
    if is_remote(path):
        return _save_remote(snapshot, path, world, keep_last)
    root = Path(os.path.realpath(path))
    target = folder_of(root, snapshot.step) if in_root else root
    folder = StagedFolder(target, is_checkpoint, FILES)
    attempt = Attempt(world, f"the training state was not saved to {os.fspath(path)}.", (UNCHANGED,))
    try:
        staging, told = _open(snapshot, folder, attempt, world, root if in_root else None)
        once, old, found = _Once(snapshot, staging, told), list[Path](), None
        with attempt:
            found = _write_own(snapshot, staging / own_file(world), once.write if world.rank == WRITER else None)
        files = dict(attempt_agree(attempt, folder, (own_file(world), found)))
        with attempt:
            if world.rank == WRITER:
                once.finish(files, partial(_header_of, staging))
                old = folder.commit(keep_previous=True)
                if in_root:
                    set_latest(root, target)
                    old += take_out_old(root, keep_last, target)
        old = attempt_agree(attempt, folder, old)[WRITER]
    finally:
        folder.discard()
    remove_together(old, world)
    return target


def remove_together(folders: Sequence[Path], world: Axis) -> None:
    """Remove folders that have been taken out already, each rank its share of the files: large ones take time."""
    files = sorted(file for folder in folders for file in folder.rglob("*") if not file.is_dir())
    for file in files[world.rank :: world.size]:
        file.unlink(missing_ok=True)
    if folders:
        agree(None, world)
        for folder in folders if world.rank == WRITER else ():
            shutil.rmtree(folder, ignore_errors=True)


def _save_remote(snapshot: Snapshot, path: str | os.PathLike[str], world: Axis, keep_last: int | None) -> Path:
    """As `save_training`, into a store; see checkpoint/remote.py."""
    attempt = Attempt(world, f"the training state was not saved to {os.fspath(path)}.", (UNCHANGED,))
    there, name, found = None, "", None
    with attempt:
        there = RemoteFolder(path)
        if world.rank == WRITER:
            there.clear()
            name = there.new_name(snapshot.step)
    names, told = zip(*attempt.agree((name, _Told.of(snapshot))))
    name = names[WRITER]
    assert there is not None  # else the exchange has raised
    once = _Once(snapshot, there.local, told)
    with attempt:
        found = _write_own(snapshot, there.local / own_file(world), once.write if world.rank == WRITER else None)
        there.put(name, own_file(world))
    files = dict(attempt.agree((own_file(world), found)))
    with attempt:
        if world.rank == WRITER:
            once.finish(files, partial(_remote_header, there, name))
            for file in (OBJECTS, *[CONFIG] * (snapshot.write_config is not None), MANIFEST):
                there.put(name, file)
            there.set_latest(name)
            there.remove_old(keep_last, name)
    attempt.agree()
    return Path(os.fspath(path)) / name


def own_file(world: Axis) -> str:
    """Name of the file that this rank writes."""
    return f"rank-{world.rank:05d}-of-{world.size:05d}.safetensors"


class _Told(NamedTuple):
    """What the writer has to know of a rank."""

    numbers: dict[str, dict[str, Any]]
    groups: list[Group]
    names: dict[str, tuple[str, ...]]
    own: dict[str, Any]

    @staticmethod
    def of(snapshot: Snapshot) -> _Told:
        items = snapshot.items
        return _Told(items.numbers, items.groups, items.names, snapshot.own)


def _header_of(folder: Path, name: str) -> Header:
    with TensorFile(folder / name) as opened:
        return opened.about, opened.entries


def _remote_header(there: RemoteFolder, folder: str, name: str) -> Header:
    return parse_header(partial(there.head, folder, name), there.size(folder, name))


def attempt_agree(attempt: Attempt, folder: StagedFolder, value: Any) -> list[Any]:
    """Exchange status; whoever hears of a failure finds no trace of it."""
    if attempt.error is not None:
        folder.discard()
    return attempt.agree(value)


def _open(
    snapshot: Snapshot, folder: StagedFolder, attempt: Attempt, world: Axis, root: Path | None
) -> tuple[Path, Sequence[_Told]]:
    """The folder to write into, made by one rank and known to all; and what there is to know of all ranks."""
    with attempt:
        if world.rank == WRITER:
            if root is not None:
                _check_root(root)
                clear(root)
            folder.open()
    staging: Path
    stagings, told = zip(*attempt_agree(attempt, folder, (folder.staging, _Told.of(snapshot))))
    staging = stagings[WRITER]
    with attempt:
        if not staging.is_dir():
            raise CheckpointError(
                explain(
                    f"{staging.parent} is not the same folder on this machine as on the first rank's.",
                    [("needs", "a file system that all machines share")],
                )
            )
    return staging, told


def _check_root(root: Path) -> None:
    """Refuse a folder that is something else."""
    if is_checkpoint(root):
        raise CheckpointError(
            explain(f"{root} is itself a checkpoint of one step.", [("try", f"the folder it lies in: {root.parent}")])
        )
    if root.exists() and not root.is_dir():
        raise CheckpointError(explain(f"{root} is a file.", [("needs", "a folder, or a path that does not exist yet")]))


def _write_own(snapshot: Snapshot, file: Path, meanwhile: Callable[[], None] | None) -> FileSum:
    chunks = {text: [key, shape, offset] for text, (key, shape, offset) in snapshot.chunks.items()}
    about = {"chunks": json.dumps(chunks, separators=(",", ":"))}
    return write_tensors(snapshot.tensors, file, about, meanwhile or (lambda: None))


class _Once:
    """What is written once, by one rank: Python objects, the model's config and, last of all, the manifest.

    Args:
        folder: where to.
        told: by rank.
    """

    def __init__(self, snapshot: Snapshot, folder: Path, told: Sequence[_Told]) -> None:
        self.snapshot, self.folder, self.told = snapshot, folder, told
        self.sums: dict[str, FileSum] = {}

    def write(self) -> None:
        """All but the manifest."""
        objects = dict(self.snapshot.objects)
        if "optimizer" in self.snapshot.parts:
            merged = merge_groups([each.groups for each in self.told])
            objects["groups"] = [(group.options, group.names) for group in merged]
        objects["own"] = [each.own for each in self.told]
        self.sums[OBJECTS] = _write_objects(objects, self.folder / OBJECTS)
        if self.snapshot.write_config is not None:
            (self.folder / CONFIG).mkdir()
            self.snapshot.write_config(self.folder / CONFIG)
            for file in sorted(file for file in (self.folder / CONFIG).rglob("*") if file.is_file()):
                self.sums[file.relative_to(self.folder).as_posix()] = checksum(file)

    def finish(self, files: Mapping[str, FileSum], header_of: Callable[[str], Header]) -> None:
        """The manifest.

        Args:
            files: of all ranks.
            header_of: reads the header of one.
        """
        announced = [each for name in files for each in _announced(header_of(name), name)]
        names = {first: of for each in self.told for first, of in each.names.items()}
        numbers, shot = merge_numbers(each.numbers for each in self.told), self.snapshot
        sums = {**files, **self.sums}
        Manifest(shot.step, collect(announced), names, sums, shot.parts, shot.about, numbers).write(self.folder)


def _announced(header: Header, name: str) -> list[Announced]:
    found, (about, entries) = [], header
    for text, (key, shape, offset) in json.loads(about["chunks"]).items():
        entry = entries[text]
        found.append(Announced(Key(*key), tuple(shape), entry.dtype, Chunk(name, text, tuple(offset), entry.shape)))
    return found


def _write_objects(objects: Mapping[str, Any], file: Path) -> FileSum:
    """Python objects, as torch writes them, if they can be read again without running code from the file.

    Raises:
        CheckpointError: naming what cannot.
    """
    for name, value in objects.items():
        check_plain(name, value)
    torch.save(dict(objects), file)
    sync(file)
    return checksum(file)


def check_plain(name: str, value: Any) -> None:
    """Refuse what could not be loaded again.

    Raises:
        CheckpointError: it is made of more than numbers, text, tensors, and lists and dicts of these.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # pickle raises many kinds
        raise CheckpointError(
            explain(
                f"the state of {name} cannot be saved.",
                [
                    ("reason", f"{type(error).__name__}: {str(error).splitlines()[0]}"),
                    (
                        "rule",
                        "it is made of numbers, text, tensors, and lists and dicts of these: a checkpoint runs no code",
                    ),
                ],
            )
        ) from error
