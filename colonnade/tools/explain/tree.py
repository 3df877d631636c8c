"""The tree of an explanation: one node a module, and identical neighbours folded into one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Traffic:
    """A collective over the tensor-parallel ranks that every training step makes, without recomputation.

    Args:
        operation: "all_reduce" or "all_gather", as the ledger calls it.
        when: "forward" or "backward".
        per_token: elements for each of the b·s tokens of a batch.
        fixed: elements whatever the batch.
    """

    operation: str
    when: str
    per_token: int = 0
    fixed: int = 0

    def __str__(self) -> str:
        size = f"b·s·{self.per_token}" if self.per_token else f"{self.fixed} elements"
        return f"{self.when} {self.operation.replace('_', '-')} of {size}"


@dataclass(frozen=True)
class Node:
    """One module.

    Args:
        name: its name in its parent; several, such as "0–31", where identical ones are folded.
        native: class it has in the unmodified model.
        kind: what becomes of it, in a word or two; empty where it holds nothing and nothing happens to it.
        why: the reason, with numbers.
        rule: the class under which the policy speaks of it; None where it says nothing.
        parameters, local_parameters: entries of its own parameters in the logical model and on rank 0, each parameter
            counted once (where it is met first), not those of its children.
        traffic: what it communicates in a step.
        children: the modules below it.
        count: how many modules the line stands for.
    """

    name: str
    native: str
    kind: str = ""
    why: str = ""
    rule: str | None = None
    parameters: int = 0
    local_parameters: int = 0
    traffic: tuple[Traffic, ...] = ()
    children: tuple[Node, ...] = ()
    count: int = 1

    def walk(self) -> Iterator[tuple[Node, int]]:
        """This node and all below, each with the number of modules it stands for."""
        yield self, self.count
        for child in self.children:
            for node, times in child.walk():
                yield node, times * self.count

    @property
    def total(self) -> int:
        """Parameter entries of the logical model, those below included."""
        return sum(node.parameters * times for node, times in self.walk())

    @property
    def local_total(self) -> int:
        """Parameter entries of rank 0, those below included."""
        return sum(node.local_parameters * times for node, times in self.walk())

    def messages(self) -> Iterator[tuple[Traffic, int]]:
        """All collectives of this node and those below, each with how often it is made."""
        for node, times in self.walk():
            for traffic in node.traffic:
                yield traffic, times

    def to_json(self) -> dict[str, Any]:
        """Plain data, with names as written here."""
        plain = asdict(replace(self, children=()))
        return plain | {"children": [child.to_json() for child in self.children]}


def without_lists(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Put the members of a list in the list's place: `layers` with a child `0–31` becomes `layers.0–31`."""
    flat: list[Node] = []
    for node in nodes:
        if node.native == "ModuleList" and not node.kind and all(child.name[:1].isdigit() for child in node.children):
            flat += [replace(child, name=f"{node.name}.{child.name}") for child in node.children]
        else:
            flat.append(node)
    return tuple(flat)


def fold(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Join neighbours that are numbered and differ in their numbers only."""
    joined: list[list[Node]] = []
    for node in nodes:
        last = joined[-1][-1] if joined else None
        alike = last is not None and node.name.isdigit() and last.name.isdigit()
        if last is not None and alike and replace(node, name="") == replace(last, name=""):
            joined[-1].append(node)
        else:
            joined.append([node])
    return tuple(
        group[0] if len(group) == 1 else replace(group[0], name=f"{group[0].name}–{group[-1].name}", count=len(group))
        for group in joined
    )
