"""Choices that have passed their check, kept between runs: by the model's code and config, the ranks and the versions."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from colonnade.shardformer.inference import check, classify, parts, policy, probe, search, trace
from colonnade.shardformer.inference.search import Choice

_held: dict[str, Choice] = {}


def key_of(model: Any, ranks: int) -> str:
    """What a choice depends on, as one word."""
    parts_of_key = [
        type(model).__module__,
        type(model).__qualname__,
        *_code(type(model)),
        _config(model),
        str(ranks),
        torch.__version__,
        version("transformers") if hasattr(model, "config") else "",
    ]
    return hashlib.sha256("\0".join(parts_of_key).encode()).hexdigest()


def find(key: str) -> Choice | None:
    """The choice kept under a key; None where there is none, or none that can be read."""
    if key not in _held:
        try:
            _held[key] = Choice(**json.loads(_file(key).read_text()))
        except (OSError, ValueError, TypeError):  # not there, or written by somebody else
            return None
    return _held[key]


def keep(key: str, choice: Choice) -> None:
    """Keep a choice for this process, and for later ones where its folder can be written."""
    _held[key] = choice
    try:
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=_file(key).parent, delete=False) as file:
            json.dump(dataclasses.asdict(choice), file)
        os.replace(file.name, _file(key))  # whole or not at all: other ranks and jobs write here too
    except OSError:  # a home that cannot be written is no reason not to train
        return


def _file(key: str) -> Path:
    root = os.environ.get("COLONNADE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "colonnade"
    return Path(root).expanduser() / "policies" / f"{key}.json"


def _config(model: Any) -> str:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        return json.dumps(config.to_dict(), sort_keys=True, default=str)
    return str([(name, tuple(p.shape)) for name, p in model.named_parameters()])


def _code(kind: type) -> Iterator[str]:
    """The text of the modules that define the model's class, and of ours that judge it."""
    for module in (inspect.getmodule(kind), check, classify, parts, policy, probe, search, trace):
        try:
            yield inspect.getsource(module)  # type: ignore[arg-type]  # None raises TypeError, as is caught
        except (OSError, TypeError):  # typed in at a prompt
            yield ""
