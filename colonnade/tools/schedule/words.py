"""What is said about a schedule, the same in text and in drawings."""

from __future__ import annotations

from collections.abc import Iterator

from colonnade.pipeline.action import Action
from colonnade.pipeline.schedule import STYLES, Schedule
from colonnade.pipeline.timeline import Timeline

IN_FLIGHT = "activations in flight (micro-batches × stages)"
WEIGHTS_DUE = "kept for W"


def title(schedule: Schedule) -> str:
    """Style and numbers."""
    several = f" · {schedule.chunks} stages on each rank" if schedule.chunks > 1 else ""
    return (
        f"{schedule.style} · {_count(schedule.ranks, 'rank')} · {_count(schedule.microbatches, 'micro-batch')}{several}"
    )


def idea(schedule: Schedule, measured: bool) -> str:
    """What the style is, and whether this is a measurement."""
    return f"{'measured · ' if measured else ''}{STYLES[schedule.style].idea}"


def idle_line(timeline: Timeline, measured: bool) -> str:
    """The share of time in which ranks do nothing, with the part of it in which a rank waits in the midst of its work."""
    ranks = range(timeline.schedule.ranks)
    whole = timeline.makespan * timeline.schedule.ranks
    between = sum(map(timeline.idle_between, ranks)) / whole if whole else 0.0
    name = "idle" if measured else "bubble"
    return (
        f"{name} {percent(timeline.idle_share)} of {number(timeline.makespan)} {'s' if measured else 'units'}; "
        f"{percent(between)} between a rank's first action and its last"
    )


def kind_names(schedule: Schedule) -> dict[str, str]:
    """Kind of action → its name, for a legend."""
    backward = "backward of the inputs" if schedule.splits_backward else "backward"
    names = {"F": "forward", "B": backward, "W": "gradient of the weights"}
    return {kind: names[kind] for kind in schedule.kinds}


def chunk_of(schedule: Schedule, action: Action) -> int:
    """Which of its rank's stages an action is on, from 0."""
    return schedule.stages_of(schedule.rank_of(action.stage)).index(action.stage)


def label(schedule: Schedule, action: Action) -> str:
    """An action in a line of its rank: F3, or with the stage where the rank has several, 6F3."""
    return str(action) if schedule.chunks > 1 else f"{action.kind}{action.microbatch}"


def rank_rows(timeline: Timeline) -> Iterator[tuple[str, str, str]]:
    """For each rank its name, how much of the time it is idle, and the most that is in flight on it."""
    for rank in range(timeline.schedule.ranks):
        yield f"rank {rank}", f"idle {percent(timeline.idle_share_of(rank))}", f"peak {timeline.peak_in_flight(rank)}"


def percent(share: float) -> str:
    """A share as a percentage; 0 % only where it is 0."""
    return "0 %" if abs(share) < 1e-9 else f"{100 * share:.1f} %"


def number(value: float) -> str:
    """A time, without digits that say nothing."""
    return f"{value:.4g}"


def _count(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}{'es' if name.endswith('ch') else 's'}"
