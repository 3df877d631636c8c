"""What a folder of checkpoints, or one of them, holds; in lines of text."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path

from colonnade.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from colonnade.checkpoint.root import LATEST, find_checkpoint, is_checkpoint, steps_in
from colonnade.checkpoint.staged_folder import is_being_written
from colonnade.tools.explain.numbers import short_bytes


def inspect_lines(path: str | Path, pattern: str | None = None) -> Iterator[str]:
    """A folder of checkpoints, its steps first; then the one that is meant.

    Args:
        pattern: list the tensors whose names it matches, too.

    Raises:
        CheckpointError: there is none.
    """
    root, folder = Path(os.path.realpath(path)), find_checkpoint(path)
    if folder != root:
        yield from _root_lines(root, folder)
        yield ""
    yield from _checkpoint_lines(folder, read_manifest(folder), pattern)


def _root_lines(root: Path, meant: Path) -> Iterator[str]:
    yield f"{root}"
    rows = [("step", "size", "saved", "")]
    for step, folder in steps_in(root).items():
        if not is_checkpoint(folder):
            rows.append((str(step), "", "", "is being replaced, or was when a job died"))
            continue
        nbytes = sum(found.nbytes for found in read_manifest(folder).files.values())
        saved = datetime.fromtimestamp((folder / MANIFEST).stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
        rows.append((str(step), short_bytes(nbytes), saved, f"← {LATEST}" if folder == meant else ""))
    yield from _table(rows)
    for left in sorted(root.glob(".step-*.saving-*")):
        state = (
            "is being written" if is_being_written(left) else "was left by a save that died; the next one removes it"
        )
        yield f"  {left.name} {state}"


def _checkpoint_lines(folder: Path, manifest: Manifest, pattern: str | None) -> Iterator[str]:
    weights, states = manifest.of_part("model"), manifest.of_part("optimizer")
    yield f"{folder}"
    rows = [("step", str(manifest.step)), ("holds", ", ".join(manifest.parts))]
    rows += [(key, str(value)) for key, value in manifest.about.items()]
    rows.append(("parameters", f"{sum(math.prod(t.shape) for t in weights.values()):,} in {len(weights)} tensors"))
    for part, tensors in (("model", weights), ("optimizer", states)):
        if tensors:
            rows.append((f"bytes, {part}", short_bytes(sum(t.nbytes for t in tensors.values()))))
    ties = [names for names in manifest.names.values() if len(names) > 1]
    rows += [("tied", " = ".join(names)) for names in ties]
    rows += [("files", f"{len(manifest.files)}, {short_bytes(sum(f.nbytes for f in manifest.files.values()))}")]
    yield from _table(rows)
    yield from _table([(f"  {name}", short_bytes(found.nbytes)) for name, found in manifest.files.items()])
    if pattern is not None:
        found = [(str(k), t) for k, t in manifest.tensors.items() if fnmatch(str(k), pattern)]
        yield f"{len(found)} tensors match {pattern}"
        yield from _table(
            [
                (name, str(list(t.shape)), str(t.dtype).removeprefix("torch."), f"{len(t.chunks)} chunk{'s' * (len(t.chunks) > 1)}")
                for name, t in found
            ]
        )  # fmt: skip


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    for row in rows:
        yield "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip()
