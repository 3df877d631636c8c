"""Folders in the Hugging Face hub format: how to tell one, and what its safetensors files hold."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from colonnade.checkpoint.hub_plan import INDEX, WEIGHTS, SavePlan
from colonnade.checkpoint.staged_folder import sync
from colonnade.errors import CheckpointError, explain

WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_MODEL_FILES = re.compile(WEIGHT_FILES.pattern + r"|config\.json|pytorch_model.*\.bin(\.index\.json)?")


@dataclass(frozen=True)
class Stored:
    """Where a key is stored, and what the file's header says of it (dtype in safetensors' words: "F32", "BF16")."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds a model in hub format, by the names in it."""
    return any(_MODEL_FILES.fullmatch(name) for name in os.listdir(folder))


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights that can be loaded from here."""
    return (folder / WEIGHTS).is_file() or (folder / INDEX).is_file()


def read_headers(folder: Path) -> dict[str, Stored]:
    """All keys stored in a folder, from the index and the header of every file; no weights are read.

    Raises:
        CheckpointError: naming the file that is missing, cut short or unreadable, or lacks a key of the index.
    """
    if not (folder / INDEX).is_file():
        return _read_header(folder / WEIGHTS)
    try:
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[str, list[str]] = {}
        for key, name in weight_map.items():
            by_file.setdefault(name, []).append(key)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX} is not a valid index: {type(error).__name__}: {error}") from error
    found: dict[str, Stored] = {}
    for name, keys in sorted(by_file.items()):
        header = _read_header(folder / name)
        absent = [key for key in keys if key not in header]
        if absent:
            raise CheckpointError(
                explain(
                    f"{folder / name} lacks {len(absent)} of the {len(keys)} keys that {INDEX} places there.",
                    [("lacks", ", ".join(absent[:5]) + (", …" if len(absent) > 5 else ""))],
                )
            )
        found.update((key, header[key]) for key in keys)
    return found


def _read_header(file: Path) -> dict[str, Stored]:
    with open_weights(file) as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 - not a dict
        return {key: Stored(file, tuple(part.get_shape()), str(part.get_dtype())) for key, part in slices.items()}


def open_weights(file: Path) -> safe_open:
    """Open a safetensors file; opening checks its header against the length of the file.

    Raises:
        CheckpointError: naming the file, where it is missing, cut short or no safetensors file.
    """
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        state = "is missing" if not file.exists() else f"cannot be read ({file.stat().st_size} bytes): {error}"
        raise CheckpointError(f"{file} {state}.") from error


def write_weights(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write one safetensors file and wait until it is on disk."""
    # Called by its full name, so that a patched writer is used.
    safetensors.torch.save_file(tensors, str(file), metadata={"format": "pt"})
    # Files come out readable by their owner alone; give them the access that the folder has.
    file.chmod(file.parent.stat().st_mode & 0o666)
    sync(file)


def write_index(plan: SavePlan, folder: Path) -> None:
    """Write the index, as transformers does, where there are several files."""
    if len(plan.files) == 1:
        return
    index = {
        "metadata": {"total_parameters": plan.total_parameters, "total_size": plan.total_size},
        "weight_map": {key: file.name for file in plan.files for key in file.keys},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
