"""Action: one step of one rank, and on which rank each stage lives. The alphabet in which schedules are written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Action(NamedTuple):
    """One stage works on one micro-batch.

    Args:
        kind: "F" forward, "B" backward (of the inputs alone, where the schedule splits it), "W" gradient of the weights.
        stage: from 0, in the order of the forward.
        microbatch: from 0.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def needs_of(action: Action, num_stages: int) -> Iterator[Action]:
    """What has to be done before an action, its own rank's order aside."""
    kind, stage, microbatch = action
    if kind == "F" and stage > 0:
        yield Action("F", stage - 1, microbatch)
    if kind == "B":
        yield Action("F", stage, microbatch)
        if stage + 1 < num_stages:
            yield Action("B", stage + 1, microbatch)
    if kind == "W":
        yield Action("B", stage, microbatch)


def rank_on_loop(stage: int, ranks: int) -> int:
    """Rank of a stage where the stages go round the ranks: 0 1 2 3, 0 1 2 3."""
    return stage % ranks


def rank_on_v(stage: int, ranks: int) -> int:
    """Rank of a stage where the stages go down the ranks and up again: 0 1 2 3, 3 2 1 0. The loss is where the input is."""
    return stage if stage < ranks else 2 * ranks - 1 - stage
