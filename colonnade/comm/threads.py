"""Ranks as threads of one process: to try a layout on a small model without a job.

A `ThreadGroup` stands in an `Axis` where a process group would; the collectives of this library know both. The sums are
taken in the order of the ranks, so every thread gets the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from colonnade.cluster.mesh import Axis
from colonnade.errors import CommunicationError

PATIENCE = 120.0  # seconds until a rank that waits for the others gives up
Result = TypeVar("Result")


class ThreadGroup:
    """Lets the threads of a group exchange values.

    Args:
        size: number of threads.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=PATIENCE)
        self._slots: list[tuple[str, Any]] = [("", None)] * size

    def exchange(self, call: str, rank: int, value: Any) -> list[Any]:
        """The values of all ranks, in order.

        Args:
            call: what is being done; all ranks must be doing the same.

        Raises:
            CommunicationError: they are not, or one has given up.
        """
        self._slots[rank] = (call, value)
        self._wait()
        slots = list(self._slots)
        values = [v.detach().clone() if isinstance(v, torch.Tensor) else v for _, v in slots]
        self._wait()  # nobody writes the next value, or over this one, before all have read
        calls = dict.fromkeys(made for made, _ in slots)
        if len(calls) > 1:
            raise CommunicationError(f"ranks made different calls: {', '.join(calls)}")
        return values

    def abort(self) -> None:
        """Let no other rank wait for this one."""
        self._barrier.abort()

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise CommunicationError("another rank has stopped") from None


def run_as_ranks(size: int, function: Callable[[Axis], Result], name: str = "tp") -> list[Result]:
    """Call a function once for each rank of an axis, in threads; the results in order of rank.

    Raises:
        what the first rank that failed by itself raised.
    """
    group = ThreadGroup(size)
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        try:
            results[rank] = function(Axis(name, size, rank, tuple(range(size)), group))
            group.exchange("the end", rank, None)  # a rank that has more to say says it to nobody
        except BaseException as error:
            errors.append((rank, error))
            group.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        own = [error for _, error in sorted(errors, key=lambda e: e[0]) if not isinstance(error, CommunicationError)]
        raise own[0] if own else errors[0][1]
    return results
