"""Timeline: when each action of a schedule runs, by a logical clock or as measured; idle time and memory read off it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from colonnade.errors import ConfigError, explain
from colonnade.pipeline.action import Action, needs_of
from colonnade.pipeline.schedule import Schedule, check, play_order

Costs = Mapping[str | tuple[str, int], float]


class Span(NamedTuple):
    """An action and the time that it takes, in units of the costs, or seconds where it was measured."""

    action: Action
    start: float
    end: float


class Level(NamedTuple):
    """How many there are from a time on, until the next level."""

    time: float
    number: int


@dataclass(frozen=True)
class Timeline:
    """A schedule that has been played.

    Args:
        schedule: which.
        spans: by rank, in the order in which they ran.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def start(self) -> float:
        """When the first action starts."""
        return min((s.start for of_rank in self.spans for s in of_rank), default=0)

    @property
    def makespan(self) -> float:
        """Time from the start of the first action to the end of the last, of all ranks."""
        return max((s.end for of_rank in self.spans for s in of_rank), default=0) - self.start

    def busy(self, rank: int) -> float:
        """Time in which a rank computes."""
        return sum(s.end - s.start for s in self.spans[rank])

    def idle_between(self, rank: int) -> float:
        """Time in which a rank waits between its first action and its last."""
        spans = self.spans[rank]
        return spans[-1].end - spans[0].start - self.busy(rank) if spans else 0

    def idle_share_of(self, rank: int) -> float:
        """Share of the makespan in which a rank does nothing."""
        return 1 - self.busy(rank) / self.makespan if self.makespan else 0.0

    @property
    def idle_share(self) -> float:
        """Share of all ranks' makespan in which they do nothing: the bubble."""
        return sum(map(self.idle_share_of, range(len(self.spans)))) / len(self.spans)

    def in_flight(self, rank: int) -> list[Level]:
        """Activations kept on a rank, micro-batches × stages: from the start of a forward to the end of its backward."""
        return self._levels(rank, "F", "B")

    def weights_due(self, rank: int) -> list[Level]:
        """What is kept for gradients of weights, micro-batches × stages: from the end of "B" to the end of "W"."""
        return self._levels(rank, "B", "W")

    def peak_in_flight(self, rank: int) -> int:
        """Most activations kept on a rank at a time, micro-batches × stages."""
        return max(level.number for level in self.in_flight(rank))

    def peak_kept(self, rank: int) -> int:
        """Most micro-batches × stages at a time of which a rank keeps anything: from "F" to its last action, "B" or "W"."""
        last = self.schedule.kinds[-1]
        return max(level.number for level in self._levels(rank, "F", last))

    def _levels(self, rank: int, first: str, last: str) -> list[Level]:
        """Count from the first kind on (its start where that is "F", else its end) until the end of the last kind."""
        changes: dict[float, int] = {self.start: 0}
        for action, start, end in self.spans[rank]:
            if action.kind == first and last in self.schedule.kinds:
                begins = start if first == "F" else end
                changes[begins] = changes.get(begins, 0) + 1
            elif action.kind == last:
                changes[end] = changes.get(end, 0) - 1
        levels: list[Level] = []
        count = 0
        for time in sorted(changes):
            count += changes[time]
            if not levels or count != levels[-1].number:
                levels.append(Level(time, count))
        return levels


def simulate(schedule: Schedule, costs: Costs | None = None, transfer: float = 0) -> Timeline:
    """Play a schedule on a logical clock: each action as soon as its rank is free and what it needs is there.

    Args:
        schedule: one that passes `check`.
        costs: duration of "F", "B" and "W", each 1 where it is not given; of one stage's with ("F", stage). Where the
            schedule does not split the backward, its "B" takes as long as "B" and "W" together.
        transfer: time between the end of an action and its result being on another rank.

    Raises:
        ConfigError: the schedule cannot be played, or a duration is negative, infinite or of an unknown kind.
    """
    check(schedule)
    lasts = _durations(schedule, costs or {}, transfer)
    ends: dict[Action, float] = {}
    free: list[float] = [0] * schedule.ranks
    spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    for action in play_order(schedule):
        rank = schedule.rank_of(action.stage)
        start = free[rank]
        for need in needs_of(action, schedule.num_stages):
            start = max(start, ends[need] + (transfer if schedule.rank_of(need.stage) != rank else 0))
        free[rank] = ends[action] = start + lasts[action.kind, action.stage]
        spans[rank].append(Span(action, start, free[rank]))
    return Timeline(schedule, tuple(map(tuple, spans)))


def _durations(schedule: Schedule, costs: Costs, transfer: float) -> dict[tuple[str, int], float]:
    known = {key for kind in "FBW" for key in (kind, *((kind, s) for s in range(schedule.num_stages)))}
    wrong = [(str(key), str(cost)) for key, cost in [*costs.items(), ("transfer", transfer)] if not 0 <= cost < inf]
    wrong += [(str(key), "is no kind of action or no stage") for key in costs if key not in known]
    if wrong:
        rule = ("needs", 'durations from 0 of "F", "B" or "W", or of ("F", stage) and so on')
        raise ConfigError(explain("These costs of a pipeline schedule cannot be.", [*wrong, rule]))

    def cost(kind: str, stage: int) -> float:
        return costs.get((kind, stage), costs.get(kind, 1))

    durations = {(kind, s): cost(kind, s) for kind in schedule.kinds for s in range(schedule.num_stages)}
    if schedule.kinds == "FB":
        durations |= {("B", s): cost("B", s) + cost("W", s) for s in range(schedule.num_stages)}
    return durations
