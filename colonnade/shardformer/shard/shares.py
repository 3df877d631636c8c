"""How heads and widths are shared out: refused where a rank would hold nothing, told where ranks get unequal work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from colonnade.errors import ConfigError, explain
from colonnade.model.layout import deal_blocks
from colonnade.shardformer.layer.linear import ColumnParallel, RowParallel
from colonnade.shardformer.shard.plan import Match, Replacement, compact

UNEVEN = 0.05  # by how much the fullest rank's share may exceed the mean before it is worth a line


@dataclass(frozen=True)
class Number:
    """A number that is shared out: of heads, in blocks that stay together where they can, or of the entries of a width.

    Args:
        label: what the policy calls it.
        blocks: of key/value heads, or entries.
        heads: of query heads; the same as blocks where there are no others.
    """

    label: str
    blocks: int
    heads: int

    def shares(self, ranks: int) -> list[int]:
        """What each rank gets, in heads or entries."""
        return [r.size for r in deal_blocks(self.blocks, ranks, self.heads // self.blocks)]

    def excess(self, ranks: int) -> float:
        """How much more the fullest rank gets than the mean, as a part of that."""
        shares = self.shares(ranks)
        return max(shares) * ranks / sum(shares) - 1

    def is_even(self, ranks: int) -> bool:
        """Whether shares are equal, or so nearly that it is not worth a line."""
        return self.excess(ranks) <= UNEVEN


def check_shares(matches: Iterable[Match], ranks: int, model_name: str) -> str:
    """Refuse a number of ranks on which some would hold nothing.

    Returns:
        What is shared out unequally, in words for the person; empty where nothing is to speak of.

    Raises:
        ConfigError: with every number that is too small, where it stands, and the sizes that work.
    """
    numbers = numbers_of(matches)
    scarce = {number: names for number, names in numbers.items() if number.heads < ranks}
    if scarce:
        raise ConfigError(
            explain(
                f"tp_size={ranks} does not fit {model_name} ({len(scarce)} problem{'s' * (len(scarce) != 1)}).",
                [
                    *((n.label, f"{n.heads} for {ranks} ranks   ({compact(names)})") for n, names in scarce.items()),
                    ("rule", "every rank holds at least one of each"),
                    ("try", at_most(min(n.heads for n in numbers))),
                ],
            )
        )
    return _uneven(numbers, ranks, model_name)


def at_most(most: int) -> str:
    """The advice to take no more ranks than so many."""
    return f"tp_size={most} or less" if most > 1 else "tp_size=1, which splits no layer"


def numbers_of(matches: Iterable[Match]) -> dict[Number, list[str]]:
    """The numbers that a policy shares out, each with the layers where it stands."""
    numbers: dict[Number, list[str]] = {}
    for found in matches:
        for replacement in found.replacements:
            number = _number(replacement)
            if number is not None:
                numbers.setdefault(number, []).append(replacement.name)
    return numbers


def _uneven(numbers: dict[Number, list[str]], ranks: int, model_name: str) -> str:
    rows = []
    for number, names in numbers.items():
        if not number.is_even(ranks):
            shares = number.shares(ranks)
            dealt = " + ".join(map(str, shares))
            found = f"{number.label} {sum(shares)} = {dealt}   ({compact(names)})"
            rows.append(("uneven", f"{found}: {number.excess(ranks):.0%} over the mean"))
    if not rows:
        return ""
    even = [t for t in range(1, min(n.heads for n in numbers) + 1) if all(n.is_even(t) for n in numbers)]
    return explain(
        f"tp_size={ranks} shares {model_name} out unevenly; the fullest rank sets the pace.",
        [*rows, ("even", "tp_size=" + " or ".join(map(str, even[:8])))],
    )


def _number(replacement: Replacement) -> Number | None:
    """What a replacement shares out; None for a vocabulary, which may be uneven, and for keys and values of few heads."""
    target, kwargs = replacement.target, replacement.kwargs
    if not isinstance(target, type) or getattr(target, "uneven", False):
        return None
    weight = getattr(replacement.native, "weight", None)
    if weight is None or not issubclass(target, (ColumnParallel, RowParallel)):
        return None
    output = issubclass(target, ColumnParallel)
    units, heads = kwargs.get("units"), kwargs.get("heads")
    if units is not None:
        finest = max([n for n in heads if n] or [0]) if isinstance(heads, Sequence) else heads
        if output and not finest:
            return None  # its row-parallel layer says how far the heads go
        return Number(kwargs.get("heads_name" if finest else "units_name", "heads"), units, finest or units)
    transposed = hasattr(replacement.native, "nf")
    width = weight.shape[0 if output != transposed else 1]
    pieces: Any = kwargs.get("pieces") or getattr(target, "PIECES", 1)
    entries = width // pieces if isinstance(pieces, int) else min(pieces)
    return Number(f"{'output' if output else 'input'} width", entries, entries)
