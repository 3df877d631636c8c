"""Which candidate of a policy computes what one process computes, found on a tiny twin.

[Note: candidates]
The trace says which layers form regions. It does not say which numbers a forward reads from its modules (head counts in a
view, the width of a split), nor whether a model's code can live with shards at all. Both are found by trying. First all
regions at once, from least to most intrusive. Where that fails, the vocabulary alone, and then one pattern of regions after
the other is added, at the first level at which all that has been added passes together. A region whose inside cannot be split
still has its weights split; what has to be computed or left whole is listed with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from colonnade.errors import PolicyError, explain
from colonnade.shardformer.inference.check import Twin
from colonnade.shardformer.inference.classify import Region
from colonnade.shardformer.inference.policy import GATHERED, LEVELS, VOCABULARY, InferredPolicy


@dataclass(frozen=True)
class Choice:
    """A candidate that has passed.

    Args:
        levels: pattern of regions → how far numbers are shared out; see `InferredPolicy`. A pattern not in it stays whole.
        vocabulary: "split", "gathered" or "whole".
        refused: pattern of regions, or "vocabulary" → what its twin does when it is split. A pattern that is gathered
            is there too.
    """

    levels: dict[str, int]
    vocabulary: str
    refused: dict[str, str] = field(default_factory=dict)


def search(twin: Twin, regions: list[Region]) -> Choice:
    """The first candidate under which the twin computes what it computes in one piece.

    Args:
        regions: of the twin.

    Raises:
        PolicyError: there is none; not even with every region whole.
    """

    def fails(levels: dict[str, int], vocabulary: str) -> str:
        return twin.difference(InferredPolicy(regions, levels, vocabulary))

    split = dict.fromkeys(r.pattern for r in regions if not r.reason)
    patterns = list(dict.fromkeys(r.pattern for r in regions))
    for levels, vocabulary in _at_once(list(split)):
        levels |= dict.fromkeys((p for p in patterns if p not in split), GATHERED)
        if not fails(levels, vocabulary):
            return Choice(levels, vocabulary, {} if vocabulary == "split" else {"vocabulary": fails({}, "split")})
    if reason := fails({}, "whole"):
        raise PolicyError(
            explain(
                f"no inferred policy for {type(twin.model).__name__} computes what one process computes.",
                [
                    ("reason", f"with nothing split, on ranks that only hold copies: {reason}"),
                    ("try", "custom_policy=… (docs/new_policy.md), or TorchDDPPlugin"),
                ],
            )
        )
    refused: dict[str, str] = {}
    found: dict[str, int] = {}
    vocabulary = "whole"
    for choice in VOCABULARY[:-1]:
        if not (reason := fails({}, choice)):
            vocabulary = choice
            break
        refused.setdefault("vocabulary", reason)
    for pattern in patterns:
        for level in (*LEVELS, GATHERED) if pattern in split else (GATHERED,):
            if not (reason := fails(found | {pattern: level}, vocabulary)):
                found[pattern] = level
                break
            if level != GATHERED or pattern not in refused:  # why it cannot be computed split says more
                refused[pattern] = reason
    return Choice(found, vocabulary, refused)


def _at_once(patterns: list[str]) -> Iterator[tuple[dict[str, int], str]]:
    """Candidates with everything split; a vocabulary that has to be gathered is as good."""
    for vocabulary in ("split", "gathered"):
        for level in LEVELS if patterns else (0,):
            yield dict.fromkeys(patterns, level), vocabulary
