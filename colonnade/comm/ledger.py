"""The ledger: counts what this rank communicates, by operation and mesh axis.

Costs one truth test per collective while no ledger is open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Ledger:
    """What this rank took part in while the ledger was open.

    Attributes:
        calls: number of calls by (operation, axis), for example ("all_reduce", "tp").
        elements: elements of the *whole* buffer of those calls: the input of an all-reduce, a reduce-scatter or an
            all-to-all, the output of an all-gather. Over n ranks a ring moves (n−1)/n of it per rank and direction,
            twice for an all-reduce.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.elements: Counter[tuple[str, str]] = Counter()

    def __repr__(self) -> str:
        rows = [
            f"{op} on {axis}: {n} calls, {self.elements[op, axis]} elements" for (op, axis), n in self.calls.items()
        ]
        return "Ledger(" + "; ".join(rows) + ")"


_open: list[Ledger] = []


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Count the collectives of this rank inside the block, backward passes included.

    Example:
        with colonnade.ledger() as ledger:
            booster.backward(model(**batch).loss, optimizer)
        print(ledger.calls["all_reduce", "tp"])
    """
    book = Ledger()
    _open.append(book)
    try:
        yield book
    finally:
        _open.remove(book)


def record(operation: str, axis: str, elements: int) -> None:
    """Enter one collective in every open ledger."""
    for book in _open:
        book.calls[operation, axis] += 1
        book.elements[operation, axis] += elements
