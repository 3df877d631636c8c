"""The text to train on: which files, in which order, and which of them are held out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from colonnade.errors import ConfigError, explain

# Folders of the standard library that are not its own sources: installed packages, and tests with their odd inputs.
NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One text with its name; `name` is the path relative to the folder it was found in, with forward slashes."""

    name: str
    text: str


@dataclass(frozen=True)
class Split:
    """Documents to train on, and documents that are only measured on."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


def standard_library() -> Path:
    """Folder with the sources of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_documents(path: Path | None, leave_out: Path | None = None) -> list[Document]:
    """Read a text file, or every text file below a folder, in the order of their names.

    A file counts as text when it is valid UTF-8 without a zero byte; other files, empty ones, and files or folders
    whose name starts with a dot are passed over.

    Args:
        path: file or folder; None reads the standard library's Python sources, without tests and installed packages.
        leave_out: folder that is passed over, where the results of the run go.

    Raises:
        ConfigError: when there is no such file or folder, or no text in it.
    """
    if path is None:
        return _read_folder(standard_library(), ".py", NOT_STANDARD_LIBRARY, leave_out)
    if path.is_file():
        text = _read_text(path)
        if not text:
            raise ConfigError(
                explain(f"--data {path} is {'empty' if text == '' else 'not a text file'}.", [("needs", "UTF-8 text")])
            )
        return [Document(path.name, text)]
    if not path.is_dir():
        needs = "a text file, or a folder of text files"
        raise ConfigError(explain(f"--data {path} does not exist.", [("needs", needs)]))
    return _read_folder(path, "", frozenset(), leave_out)


def _read_folder(folder: Path, suffix: str, without: frozenset[str], leave_out: Path | None) -> list[Document]:
    documents, seen = [], 0
    for file in _files_below(folder, without, leave_out):
        if not file.name.endswith(suffix):
            continue
        seen += 1
        text = _read_text(file)
        if text:
            documents.append(Document(file.relative_to(folder).as_posix(), text))
    if not documents:
        found = f"{seen} files, none of them UTF-8 text" if seen else "no files"
        raise ConfigError(
            explain(f"--data {folder} holds no text.", [("found", found), ("needs", "at least one UTF-8 text file")])
        )
    return documents


def _files_below(folder: Path, without: frozenset[str], leave_out: Path | None) -> list[Path]:
    files: list[Path] = []
    skipped = None if leave_out is None else leave_out.resolve()
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in without and not name.startswith(".")]
        folders[:] = [name for name in folders if skipped is None or Path(parent, name).resolve() != skipped]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted((f for f in files if f.is_file()), key=lambda f: f.relative_to(folder).as_posix())


def _read_text(file: Path) -> str | None:
    """Content of a file, or None where it is not UTF-8 text."""
    data = file.read_bytes()
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def split_documents(documents: list[Document], held_out_percent: float) -> Split:
    """Set documents aside for measuring.

    Documents are put in the order of a hash of their names, so that the held-out ones are a fair mixture and the same
    on every machine and in every run; the last ones, up to `held_out_percent` of all characters and at least one, are
    held out. A single document is cut at the line nearest to that share.

    Raises:
        ConfigError: when one document is all there is and it has a single line.
    """
    if len(documents) == 1:
        return _cut_in_two(documents[0], held_out_percent)
    mixed = sorted(documents, key=lambda d: hashlib.sha256(d.name.encode("utf-8", "surrogateescape")).digest())
    wanted = sum(len(d.text) for d in documents) * held_out_percent / 100
    taken, first = 0, len(mixed)
    while first > 1 and (first == len(mixed) or taken + len(mixed[first - 1].text) <= wanted):
        first -= 1
        taken += len(mixed[first].text)
    order = {d.name: position for position, d in enumerate(documents)}
    train, held_out = (sorted(part, key=lambda d: order[d.name]) for part in (mixed[:first], mixed[first:]))
    return Split(tuple(train), tuple(held_out))


def _cut_in_two(document: Document, held_out_percent: float) -> Split:
    at = document.text.rfind("\n", 0, max(1, int(len(document.text) * (1 - held_out_percent / 100)))) + 1
    if at == 0:
        at = document.text.find("\n") + 1
    if at in (0, len(document.text)):
        raise ConfigError(
            explain(
                f"{document.name} is a single line: nothing can be held out for measuring.",
                [("needs", "several files, or one file of several lines")],
            )
        )
    head, tail = document.text[:at], document.text[at:]
    return Split((Document(document.name, head),), (Document(document.name, tail),))
