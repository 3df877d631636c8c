"""Two checkpoints of any layouts, or folders of the hub, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from colonnade.checkpoint.manifest import Key
from colonnade.tools.ckpt.source import Source


@dataclass
class Difference:
    """What differs.

    Args:
        equal: number of tensors that have the same bits.
        near: those that differ by no more than the tolerance, and by how much.
        tensors: those that differ by more: name, and in which way.
        others: what is no tensor and differs: name, first, second.
        only: what one of them has alone: "first" or "second" → names.
    """

    equal: int = 0
    near: list[tuple[str, str]] = field(default_factory=list)
    tensors: list[tuple[str, str]] = field(default_factory=list)
    others: list[tuple[str, str, str]] = field(default_factory=list)
    only: dict[str, list[str]] = field(default_factory=lambda: {"first": [], "second": []})

    @property
    def is_none(self) -> bool:
        """Whether they hold the same, within the tolerance."""
        return not (self.tensors or self.others or self.only["first"] or self.only["second"])


def compare(first: Source, second: Source, tolerance: float = 0.0) -> Difference:
    """Compare two sources; two tensors are in memory at a time.

    Args:
        tolerance: largest difference that counts as none, relative to the largest entry of the second.
    """
    found = Difference()
    pairs = dict(_pairs(first, second))
    parts = {key.part for key in first.tensors} & {key.part for key in second.tensors}
    for key in first.tensors:
        if key not in pairs and key.part in parts:
            found.only["first"].append(str(key))
    claimed = set(pairs.values())
    found.only["second"] += [str(key) for key in second.tensors if key not in claimed and key.part in parts]
    for key, other in pairs.items():
        _compare(found, str(key), first.read(key), second.read(other), tolerance)
    if not (first.is_hub or second.is_hub):
        a, b = dict(first.numbers()), dict(second.numbers())
        for name in dict.fromkeys([*a, *b]):
            if not _same(a.get(name), b.get(name)):
                found.others.append((name, _short(a.get(name, "nothing")), _short(b.get(name, "nothing"))))
    return found


def _pairs(first: Source, second: Source) -> Iterator[tuple[Key, Key]]:
    """Tensors of both that have a name in common."""
    by_name = {(key.part, name, key.state): key for key in second.tensors for name in second.names_of(key)}
    for key in first.tensors:
        other = next((by_name[k] for n in first.names_of(key) if (k := (key.part, n, key.state)) in by_name), None)
        if other is not None:
            yield key, other


def _compare(found: Difference, name: str, a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
    if a.shape != b.shape:
        found.tensors.append((name, f"shapes {list(a.shape)} and {list(b.shape)}"))
        return
    if a.dtype == b.dtype and torch.equal(a, b):
        found.equal += 1
        return
    wide = [t.double() if t.is_floating_point() else t.to(torch.float64) for t in (a, b)]
    unlike = (wide[0] != wide[1]) & ~(wide[0].isnan() & wide[1].isnan())
    largest = float((wide[0] - wide[1])[unlike].abs().max()) if unlike.any() else 0.0
    relative = largest / max(float(wide[1].abs().max()), 1e-30) if largest else 0.0
    formats = "" if a.dtype == b.dtype else f"; formats {a.dtype} and {b.dtype}"
    if not largest:
        found.equal += 1
        return
    text = f"largest difference {largest:.3g}, relative {relative:.3g}, in {int(unlike.sum())} of {a.numel()} entries{formats}"
    (found.near if relative <= tolerance else found.tensors).append((name, text))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 70 else f"{text[:67]}…"


def diff_lines(found: Difference, first: Any, second: Any, most: int = 20) -> Iterator[str]:
    """The verdict, and then what differs."""
    total = found.equal + len(found.near) + len(found.tensors)
    if found.is_none:
        near = f", {len(found.near)} of them within the tolerance" if found.near else ""
        yield f"the same: {total} tensors{near}"
    else:
        yield f"different: {len(found.tensors)} of {total} tensors that both have, {len(found.others)} other values"
    for which, path in (("first", first), ("second", second)):
        names = found.only[which]
        if names:
            yield f"only in {path}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
    for name, text in found.tensors[:most]:
        yield f"  {name}: {text}"
    if len(found.tensors) > most:
        yield f"  and {len(found.tensors) - most} more"
    for name, a, b in found.others[:most]:
        yield f"  {name}: {a} and {b}"
    if len(found.others) > most:
        yield f"  and {len(found.others) - most} more"
