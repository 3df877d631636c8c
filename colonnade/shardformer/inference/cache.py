"""Choices that have passed their check, kept between runs: by the model's code and config, the ranks and the versions."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import marshal
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colonnade import shardformer
from colonnade.shardformer.inference.search import Choice

_held: dict[str, Choice] = {}


def key_of(model: Any, ranks: int, edited: bool = False) -> str:
    """What a choice depends on, as one word.

    Args:
        edited: the model is something else than what its class builds from its config.
    """
    parts_of_key = [
        type(model).__module__,
        type(model).__qualname__,
        *_code(model),
        _config(model),
        "" if hasattr(_config_of(model), "to_dict") and not edited else _made_of(model),
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


def _config_of(model: Any) -> Any:
    return getattr(model, "config", None)


def _config(model: Any) -> str:
    config = _config_of(model)
    return json.dumps(config.to_dict(), sort_keys=True, default=str) if hasattr(config, "to_dict") else ""


def _made_of(model: nn.Module) -> str:
    """Modules with their flags and counts, and weights with the first name of each: what stands for a config."""
    modules = [
        (path, type(m).__qualname__, {k: _plain(v) for k, v in vars(m).items() if not k.startswith("_")})
        for path, m in model.named_modules(remove_duplicate=False)
    ]
    first: dict[torch.Tensor, str] = {}
    weights = [
        (name, tuple(p.shape), first.setdefault(p, name)) for name, p in model.named_parameters(remove_duplicate=False)
    ]
    return str((modules, weights, [(name, tuple(b.shape)) for name, b in model.named_buffers()]))


def _plain(value: Any, depth: int = 3) -> str:
    """A value as it is in every process: without addresses."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, (torch.Tensor, nn.Module)) or depth == 0:
        return type(value).__qualname__
    if isinstance(value, dict):
        return str(sorted((str(k), _plain(v, depth - 1)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return str([_plain(v, depth - 1) for v in value])
    if hasattr(value, "__qualname__"):  # a function or a class
        return str(value.__qualname__)
    return type(value).__qualname__ + _plain(getattr(value, "__dict__", {}), depth - 1)


def _code(model: nn.Module) -> Iterator[str]:
    """The text of the modules that define the model's classes, and of ours that judge, split and compute it."""
    kinds = sorted({type(m) for m in model.modules()}, key=lambda kind: (kind.__module__, kind.__qualname__))
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] != "torch"]  # whose version is in the key
    for name in dict.fromkeys(kind.__module__ for kind in own):
        same = [kind for kind in own if kind.__module__ == name]
        yield _source(inspect.getmodule(same[0])) or "".join(map(_compiled, same))
    for file in sorted(Path(next(iter(shardformer.__path__))).rglob("*.py")):
        yield file.read_text(encoding="utf-8")


def _source(module: Any) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):  # typed in at a prompt, or in a notebook
        return ""


def _compiled(kind: type) -> str:
    codes = [(name, f.__code__) for name, f in vars(kind).items() if hasattr(f, "__code__")]
    return "".join(name + marshal.dumps(code).hex() for name, code in codes)
