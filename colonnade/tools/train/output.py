"""The output folder: never written over, unless it is an earlier output of this command and the person said so.

[Note: whose files]
`run.json` marks a folder as an output of `colonnade train` and lists the files the run puts there. Only listed files
are ever removed, and the list is written before the first of them; anything else found in the folder stays.
Files that are not final yet lie in a work folder inside, on the same file system, so that publishing is renaming.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from colonnade.errors import ConfigError, explain

COMMAND = "colonnade train"
MARKER = "run.json"
WORK = ".colonnade-train"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CURVE = "loss.png"
TRACE = "pipeline_trace.json"  # of the last step


def check_output(folder: Path, overwrite: bool, sources: tuple[Path, ...] = ()) -> None:
    """See whether results may be put into `folder`. Leaves everything as it is.

    Args:
        overwrite: an earlier output of this command may be replaced.
        sources: files and folders the run reads, which must not be replaced by what it writes.

    Raises:
        ConfigError: when the folder is a file, or is not empty and may not be replaced.
    """
    for parent in (folder, *folder.parents):
        if parent.exists():
            if not parent.is_dir():
                found = f"--output {folder} needs a folder, but {parent} is a file."
                raise ConfigError(explain(found, [("try", "another path")]))
            _check_writable(folder, parent)
            break
    for source in sources:
        if source.exists() and (source.samefile(folder) if folder.exists() else False):
            raise ConfigError(
                explain(f"--output {folder} is what the run reads from.", [("try", "another folder for the results")])
            )
    if not folder.exists() or not any(folder.iterdir()):
        return
    ours = _earlier_run(folder) is not None
    if ours and overwrite:
        return
    if ours:
        found, advice = "an earlier output of colonnade train", "another folder, or --overwrite to replace it"
    else:
        found, advice = "files that colonnade train did not write; --overwrite never removes those", "another folder"
    raise ConfigError(explain(f"--output {folder} is not empty.", [("found", found), ("try", advice)]))


def _check_writable(folder: Path, existing: Path) -> None:
    """Write and remove a file beside where the results go: now, and not after all the text has been read."""
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(
            explain(
                f"--output {folder} cannot be written.",
                [("reason", f"{existing}: {error.strerror}"), ("try", "another folder")],
            )
        ) from error


def claim_output(folder: Path, options: dict[str, Any]) -> Path:
    """Make the output folder, remove an earlier output from it, mark it, and return the empty work folder inside.

    `check_output` has to come first.

    Raises:
        ConfigError: when the folder cannot be written.
    """
    work = folder / WORK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_earlier(folder)
        _write_marker(folder, options, [MARKER, METRICS])
        work.mkdir()
    except OSError as error:
        raise ConfigError(
            explain(f"--output {folder} cannot be written.", [("reason", str(error)), ("try", "another folder")])
        ) from error
    return work


def publish(folder: Path, ready: Path, options: dict[str, Any]) -> None:
    """Move finished files from the folder `ready` (below the work folder) to their final place in `folder`.

    A model folder cannot be loaded without its config.json, so that one comes last. A file of the same name that
    somebody else put there is kept beside it.
    """
    names = sorted((file.name for file in ready.iterdir()), key=lambda name: (name == "config.json", name))
    _write_marker(folder, options, [MARKER, METRICS, *names])
    for name in names:
        if (folder / name).exists():
            (folder / name).replace(folder / f"{name}.previous")
        (ready / name).replace(folder / name)


def remove_work(folder: Path) -> None:
    """Remove the work folder inside an output folder."""
    if (folder / WORK).is_dir():
        shutil.rmtree(folder / WORK)


def _earlier_run(folder: Path) -> dict[str, Any] | None:
    """Content of the marker, or None where the folder is not an output of this command."""
    try:
        content = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("command") == COMMAND else None


def _remove_earlier(folder: Path) -> None:
    """Remove the files that an earlier run has listed, the marker last."""
    run = _earlier_run(folder)
    if run is None:
        return
    listed = [name for name in run.get("files", []) if isinstance(name, str) and Path(name).name == name]
    for name in sorted(listed, key=lambda name: name == MARKER):
        file = folder / name
        if file.is_file() or file.is_symlink():
            file.unlink()
    remove_work(folder)


def _write_marker(folder: Path, options: dict[str, Any], files: list[str]) -> None:
    content = {"command": COMMAND, "files": files, "options": options}
    partial = folder / f"{MARKER}.partial"
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / MARKER)
