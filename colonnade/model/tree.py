"""Tensors in nested values: what a module is called with and what it returns, taken apart and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def leaves(value: Any) -> dict[str, torch.Tensor]:
    """All tensors in nested dicts, lists and tuples, by the path to each ("" for a tensor itself, "1.hidden_states")."""
    return dict(_walk(value, ""))


def _walk(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, item in _items(value):
            yield from _walk(item, _join(path, key))


def map_leaves(value: Any, change: Callable[[str, torch.Tensor], Any], path: str = "") -> Any:
    """The value with `change(path, tensor)` in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    changed = [(key, map_leaves(item, change, _join(path, key))) for key, item in _items(value)]
    if isinstance(value, Mapping):
        return _mapping_like(value, dict(changed))
    items = [item for _, item in changed]
    return (
        type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    )  # a named tuple takes them one by one


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        return iter(dict.items(value))  # as stored: some outputs compute what they are asked for
    return iter(value.items()) if isinstance(value, Mapping) else iter(enumerate(value))


def _mapping_like(value: Any, made: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return made
    try:
        return type(value)(**made)  # outputs of transformers are dataclasses
    except TypeError:
        return type(value)(made)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
