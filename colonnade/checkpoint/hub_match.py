"""Which key of a hub folder is which tensor of the model, and what to say where they do not fit. Reads no weights."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from colonnade.checkpoint.hub_folder import Stored
from colonnade.checkpoint.model_tensors import check_layout
from colonnade.checkpoint.transformers_internals import LoadRules

_SHOWN = 10  # names of one kind in an error


@dataclass
class Converted:
    """A conversion from several keys to tensors of another form.

    Args:
        name: the first state-dict name it makes.
        parts: its keys with their patterns, in order.
        targets: the tensors of this rank that it fills, by state-dict name.
    """

    name: str
    parts: list[tuple[str, str]]
    targets: dict[str, torch.Tensor]


@dataclass
class Match:
    """How a folder fits the tensors of this rank.

    Args:
        direct: (key, tensor) of what is stored as it is in the model.
        missing: names without a value; unexpected: keys without a place; mismatched: (name, stored shape, model shape).
    """

    direct: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    converted: list[Converted] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)


def match_keys(
    tensors: Sequence[tuple[tuple[str, ...], torch.Tensor]], stored: dict[str, Stored], rules: LoadRules
) -> Match:
    """Match every stored key with a tensor of this rank; of a tied tensor one name is enough.

    Raises:
        CheckpointError: where a tensor of the model has no memory or does not fit its own layout.
    """
    match = Match()
    layouts = [check_layout(names[0], tensor) for names, tensor in tensors]
    place = {name: index for index, (names, _) in enumerate(tensors) for name in names}
    filled: dict[int, tuple[str, str, tuple[int, ...]]] = {}  # by place: name, key, shape of its value
    groups: dict[str, list[tuple[str, str]]] = {}
    for key in rules.in_order(stored):
        name, pattern = _find(key, place, rules)
        if name is None:
            match.unexpected.append(key)
        elif pattern is not None:
            groups.setdefault(name, []).append((key, pattern))
        else:
            index = place[name]
            # Both names of a tied tensor stored: the first one in the model counts.
            if index not in filled or tensors[index][0].index(name) < tensors[index][0].index(filled[index][0]):
                filled[index] = (name, key, stored[key].shape)
    match.direct = [(key, tensors[index][1]) for index, (_, key, _) in filled.items()]
    for name, parts in groups.items():
        shapes = rules.convert(name, [(k, p, torch.empty(stored[k].shape, device="meta")) for k, p in parts])
        made = {target: tuple(value.shape) for target, value in shapes.items() if target in place}
        match.converted.append(Converted(name, parts, {target: tensors[place[target]][1] for target in made}))
        filled.update((place[target], (target, parts[0][0], shape)) for target, shape in made.items())
    for index, (name, _, shape) in sorted(filled.items()):
        if shape != layouts[index].shape:
            match.mismatched.append((name, shape, layouts[index].shape))
    absent = [names[0] for index, (names, _) in enumerate(tensors) if index not in filled]
    match.missing = _without(absent, rules.ignored(absent, "missing"))
    match.unexpected = _without(match.unexpected, rules.ignored(match.unexpected, "unexpected"))
    return match


def _find(key: str, place: dict[str, int], rules: LoadRules) -> tuple[str | None, str | None]:
    """The state-dict name for a key, with the base model's prefix added or taken away where that makes it fit."""
    renamed, pattern = rules.rename(key)
    for name, by in ((renamed, pattern), (key, None)):
        for candidate in _with_and_without(rules.prefix, name):
            if candidate in place:
                return candidate, by
    return None, None


def _with_and_without(prefix: str, name: str) -> Iterable[str]:
    yield name
    if prefix:
        yield f"{prefix}.{name}"
        if name.startswith(f"{prefix}."):
            yield name.removeprefix(f"{prefix}.")


def _without(names: list[str], taken: list[str]) -> list[str]:
    gone = set(taken)
    return [name for name in names if name not in gone]


def problem_rows(
    missing: Sequence[str],
    unexpected: Sequence[str],
    mismatched: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]],
) -> list[tuple[str, str]]:
    """Rows for the one error that lists everything that does not fit, with near names where there are some."""
    rows = []
    if mismatched:
        texts = [f"{name}: {shape} in the folder, {wanted} in the model" for name, shape, wanted in mismatched]
        rows.append((f"shape ({len(texts)})", _shorten(texts)))
    if missing:
        texts = [_with_nearest(name, unexpected) for name in missing[:_SHOWN]] + list(missing[_SHOWN:])
        rows.append((f"missing ({len(texts)})", _shorten(texts)))
    if unexpected:
        rows.append((f"unexpected ({len(unexpected)})", _shorten(unexpected)))
    if not mismatched:
        rows.append(("try", "the folder of this very model, or strict=False to load the names that agree"))
    return rows


def _with_nearest(name: str, others: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, others, n=1, cutoff=0.8)
    return f"{name}   (near: {near[0]})" if near else name


def _shorten(texts: Sequence[str]) -> str:
    more = [f"… and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return "\n".join([*texts[:_SHOWN], *more])
