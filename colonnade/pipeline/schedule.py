"""Schedule: who does what in which order, as data. Made here by name, and checked here; played elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from colonnade.errors import ConfigError, explain
from colonnade.pipeline.action import Action, needs_of, rank_on_loop, rank_on_v
from colonnade.pipeline.styles.forwards import forwards
from colonnade.pipeline.styles.gpipe import gpipe
from colonnade.pipeline.styles.interleaved import interleaved
from colonnade.pipeline.styles.one_f_one_b import one_f_one_b
from colonnade.pipeline.styles.zbh1 import zbh1
from colonnade.pipeline.styles.zbv import zbv


class Style(NamedTuple):
    """What a name of a schedule stands for.

    Args:
        write: (ranks, microbatches, chunks) → the actions of each rank.
        rank_of: (stage, ranks) → rank.
        splits_backward: whether the gradient of the weights is an action of its own.
        chunks: stages on each rank, where the caller does not say.
        most_chunks: the largest number of stages on each rank, None where any is possible.
        idea: in one line.
    """

    write: Callable[[int, int, int], Sequence[Sequence[Action]]]
    rank_of: Callable[[int, int], int]
    splits_backward: bool
    chunks: int
    most_chunks: int | None
    idea: str


STYLES = {
    "gpipe": Style(gpipe, rank_on_loop, False, 1, 1, "all forwards, then all backwards"),
    "1f1b": Style(one_f_one_b, rank_on_loop, False, 1, 1, "one forward, one backward: fewer micro-batches in flight"),
    "interleaved": Style(interleaved, rank_on_loop, False, 2, None, "1f1b with several stages a rank: less idle time"),
    "zbh1": Style(zbh1, rank_on_loop, True, 1, 1, "1f1b with weight gradients put off: a third of its idle time"),
    "zbv": Style(zbv, rank_on_v, True, 2, 2, "two stages a rank, on a V: no idle time once a rank has begun"),
}


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order.

    Args:
        style: name it was made by; decides which stages a rank holds.
        ranks, microbatches: their numbers.
        chunks: stages on each rank.
        splits_backward: whether "W" actions compute the gradients of the weights; where not, "B" does all of the backward.
        actions: by rank.
        forward_only: nothing but "F" actions (evaluation).
    """

    style: str
    ranks: int
    microbatches: int
    chunks: int
    splits_backward: bool
    actions: tuple[tuple[Action, ...], ...]
    forward_only: bool = False

    @property
    def num_stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def kinds(self) -> str:
        """The kinds of action that every stage does with every micro-batch: "F", "FB" or "FBW"."""
        return "F" if self.forward_only else "FBW" if self.splits_backward else "FB"

    def rank_of(self, stage: int) -> int:
        """Rank that holds a stage."""
        return STYLES[self.style].rank_of(stage, self.ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that a rank holds, ascending."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)


def make_schedule(
    style: str, ranks: int, microbatches: int, chunks: int | None = None, forward_only: bool = False
) -> Schedule:
    """Write a schedule.

    Args:
        style: a key of `STYLES`.
        ranks: of the pipeline.
        microbatches: any number from 1; fewer than ranks, or no multiple of them, only leaves ranks idle for longer.
        chunks: stages on each rank; by default what the style names.
        forward_only: leave out every backward, for evaluation.

    Raises:
        ConfigError: no such style, or a number it cannot work with.
    """
    chunks = _checked_chunks(style, ranks, microbatches, chunks)
    found = STYLES[style]
    lists = (
        forwards(ranks, microbatches, chunks, found.rank_of)
        if forward_only
        else found.write(ranks, microbatches, chunks)
    )
    return Schedule(style, ranks, microbatches, chunks, found.splits_backward, tuple(map(tuple, lists)), forward_only)


def _checked_chunks(style: str, ranks: int, microbatches: int, chunks: int | None) -> int:
    if style not in STYLES:
        rows = [(name, found.idea) for name, found in STYLES.items()]
        raise ConfigError(explain(f"There is no pipeline schedule {style!r}. Those there are:", rows))
    least, most = STYLES[style].chunks, STYLES[style].most_chunks
    chunks = least if chunks is None else chunks
    for name, number in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(f"{name}={number!r} of a pipeline schedule: it has to be a whole number from 1.")
    if chunks < least or (most is not None and chunks > most):
        raise ConfigError(_wrong_chunks(style, chunks))
    return chunks


def _wrong_chunks(style: str, chunks: int) -> str:
    least, most = STYLES[style].chunks, STYLES[style].most_chunks
    possible = [name for name, s in STYLES.items() if s.chunks <= chunks and (s.most_chunks or chunks) >= chunks]
    allowed = f"{least} stage{'s' * (least > 1)}" if most == least else f"at least {least} stages"
    return explain(
        f"The schedule {style} cannot work with {chunks} stages on each rank.",
        [("needs", f"{allowed} on each rank"), ("try", f"chunks={least}, or the schedule {' or '.join(possible)}")],
    )


def check(schedule: Schedule) -> None:
    """Make sure that a schedule can be played: that each action is there once, on its rank, and no rank waits for ever.

    Messages do not hold up their senders here: they are on their way as soon as their action is done.

    Raises:
        ConfigError: it cannot; the message names the actions.
    """
    found = [(rank, action) for rank, of_rank in enumerate(schedule.actions) for action in of_rank]
    problems = list(_misplaced(schedule, found))
    if not problems:
        problems = list(_waiting(schedule))
    if problems:
        raise ConfigError(explain(f"This {schedule.style} schedule cannot be played.", problems[:8]))


def _misplaced(schedule: Schedule, found: list[tuple[int, Action]]) -> Iterator[tuple[str, str]]:
    """Actions that are missing, doubled, unknown or on another rank, as rows of a message."""
    if len(schedule.actions) != schedule.ranks:
        yield "ranks", f"{schedule.ranks}, but there are lists for {len(schedule.actions)}"
    due = {
        Action(kind, stage, microbatch)
        for kind in schedule.kinds
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.microbatches)
    }
    seen: set[Action] = set()
    for rank, action in found:
        if action not in due:
            yield str(action), f"on rank {rank}, is no action of this schedule"
        elif action in seen:
            yield str(action), f"on rank {rank}, is there a second time"
        elif rank != schedule.rank_of(action.stage):
            yield str(action), f"is on rank {rank}, but its stage is on rank {schedule.rank_of(action.stage)}"
        seen.add(action)
    for action in sorted(due - seen):
        yield str(action), f"is missing on rank {schedule.rank_of(action.stage)}"


def _waiting(schedule: Schedule) -> Iterator[tuple[str, str]]:
    """For each rank that never ends, what it waits for, as rows of a message."""
    played = play_order(schedule)
    done = set(played)
    for rank, of_rank in enumerate(schedule.actions):
        for action in of_rank:
            if action not in done:
                missing = ", ".join(str(need) for need in needs_of(action, schedule.num_stages) if need not in done)
                yield f"rank {rank}", f"waits for {missing} before {action}, for ever"
                break


def play_order(schedule: Schedule) -> list[Action]:
    """The actions in an order in which they can be done one by one: each after what it needs and what its rank does before.

    Actions that can never be done are left out.
    """
    position = [0] * len(schedule.actions)
    done: set[Action] = set()
    order: list[Action] = []
    to_look_at = deque(range(len(schedule.actions)))
    waiting: dict[Action, list[int]] = {}  # an action that is due → ranks that wait for it
    while to_look_at:
        rank = to_look_at.popleft()
        of_rank = schedule.actions[rank]
        while position[rank] < len(of_rank):
            action = of_rank[position[rank]]
            missing = next((need for need in needs_of(action, schedule.num_stages) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            position[rank] += 1
            done.add(action)
            order.append(action)
            to_look_at.extend(waiting.pop(action, ()))
    return order
