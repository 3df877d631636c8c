"""The exchange of status that keeps ranks together when one of them fails (Note: one rank fails, every rank raises)."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from colonnade.cluster.mesh import Axis, ParallelMesh
from colonnade.comm.collectives import all_gather_object
from colonnade.errors import CheckpointError, ColonnadeError, explain


def agree(
    error: BaseException | None,
    where: ParallelMesh | Axis,
    value: Any = None,
    headline: str = "a checkpoint operation failed.",
    after: tuple[tuple[str, str], ...] = (),
) -> list[Any]:
    """Tell all ranks whether this one has failed; either all of them go on, or all of them raise.

    Traffic: one small all_gather_object.

    Args:
        error: what went wrong on this rank since the last exchange, or None.
        where: the ranks that take part: an axis, or all ranks of a mesh.
        value: something picklable to hand to the others along with the status.
        headline: first line of the error, the same on every rank.
        after: rows for the end of the error: what the failure leaves behind, what to do now.

    Returns:
        The values of all ranks, in order of position.

    Raises:
        CheckpointError: on every rank, with the reason of each rank that failed. An interrupt (KeyboardInterrupt,
            SystemExit) goes on as it is on the rank that caught it.
    """
    axis = where.world if isinstance(where, ParallelMesh) else where
    reports = all_gather_object((None if error is None else _reason(error), value), axis)
    reasons = [(axis.ranks[position], reason) for position, (reason, _) in enumerate(reports) if reason is not None]
    if error is not None and not isinstance(error, Exception):
        raise error
    if reasons:
        rows = [(f"rank {rank}", reason) for rank, reason in reasons]
        raise CheckpointError(explain(headline, [*rows, *after])) from error
    return [value for _, value in reports]


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, ColonnadeError) else f"{type(error).__name__}: {error}"


class Attempt:
    """Keeps the first error of the blocks it guards, so that this rank reaches the next exchange of status.

    Example:
        attempt = Attempt(mesh, "the model was not saved.")
        with attempt:
            write_my_file()
        attempt.agree()      # all ranks go on, or all raise

    Args:
        where: the ranks that take part.
        headline, after: first and last lines of the error; see `agree`.
    """

    def __init__(self, where: ParallelMesh | Axis, headline: str, after: tuple[tuple[str, str], ...] = ()) -> None:
        self.where, self.headline, self.after = where, headline, after
        self.error: BaseException | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = self.error or error
        return True

    def agree(self, value: Any = None) -> list[Any]:
        """Exchange status and a value; see `agree`."""
        return agree(self.error, self.where, value, self.headline, self.after)
