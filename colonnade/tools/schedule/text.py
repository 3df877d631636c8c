"""A schedule as lines of text: a row for each rank, time from left to right; below it what is in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from colonnade.pipeline.timeline import Level, Timeline
from colonnade.tools.schedule.words import IN_FLIGHT, idea, idle_line, kind_names, label, rank_rows, title

IDLE = "·"
BARS = " ▁▂▃▄▅▆▇█"
COLOURS = {"F": "black on bright_blue", "B": "black on bright_green", "W": "black on yellow", "": "dim"}
Piece = tuple[str, str]  # text, and the kind of its action; "" for what is none


def plain_text(timeline: Timeline, measured: bool = False, width: int | None = None) -> str:
    """The whole picture, without colours.

    Args:
        measured: times are seconds of a run, not units of a simulation.
        width: columns there are; where the labels need more, actions shrink to letters. None for as many as they need.
    """
    return "\n".join("".join(text for text, _ in line).rstrip() for line in _lines(timeline, measured, width))


def rich_text(timeline: Timeline, measured: bool = False, width: int | None = None) -> Any:
    """The same for rich's console, in colours."""
    from rich.text import Text

    lines = [
        Text.assemble(*[(text, COLOURS[kind]) for text, kind in line]) for line in _lines(timeline, measured, width)
    ]
    return Text("\n").join(lines)


def _lines(timeline: Timeline, measured: bool, width: int | None) -> Iterator[list[Piece]]:
    schedule = timeline.schedule
    scale = _scale(timeline, width)
    columns = max(1, round(timeline.makespan * scale))
    yield [(title(schedule), "")]
    yield [(idea(schedule, measured), "")]
    yield [(idle_line(timeline, measured), "")]
    yield []
    rows = list(rank_rows(timeline))
    for rank, (name, idle, _) in enumerate(rows):
        yield [(f"{name:<8}", ""), *_actions(timeline, rank, scale, columns), (f"  {idle}", "")]
    if not schedule.forward_only:
        yield []
        yield [(IN_FLIGHT, "")]
        most = max(timeline.peak_in_flight(rank) for rank in range(schedule.ranks))
        for rank, (name, _, peak) in enumerate(rows):
            bars = _bars(timeline.in_flight(rank), most, timeline.start, scale, columns)
            yield [(f"{name:<8}{bars}  {peak}", "")]
    yield []
    yield [(_legend(timeline, scale), "")]


def _legend(timeline: Timeline, scale: float) -> str:
    kinds = ", ".join(f"{kind} {name}" for kind, name in kind_names(timeline.schedule).items())
    if not _has_labels(timeline, scale):
        return f"{kinds}; too narrow for stages and micro-batches"
    return f"{'stage, ' if timeline.schedule.chunks > 1 else ''}kind, micro-batch: {kinds}"


def _has_labels(timeline: Timeline, scale: float) -> bool:
    return scale >= _needed(timeline) * (1 - 1e-9)


def _scale(timeline: Timeline, width: int | None) -> float:
    """Columns for a unit of time: as many as the labels need, or as there are."""
    needed = _needed(timeline)
    if width is None or not timeline.makespan:
        return needed
    room = max(20, width - 8 - len("  idle 99.9 %")) / timeline.makespan
    if room >= needed:
        return needed
    shortest = min(_lengths(timeline))
    even = all(abs(length / shortest - round(length / shortest)) < 1e-9 for length in _lengths(timeline))
    whole = int(room * shortest)
    return whole / shortest if even and whole else room  # whole columns look regular


def _needed(timeline: Timeline) -> float:
    """Columns for a unit of time with which all labels have room."""
    longest = max(len(label(timeline.schedule, span.action)) for of_rank in timeline.spans for span in of_rank)
    return (1 + longest) / min(_lengths(timeline))


def _lengths(timeline: Timeline) -> list[float]:
    lengths = [span.end - span.start for of_rank in timeline.spans for span in of_rank]
    return [length for length in lengths if length > 0] or [1.0]


def _actions(timeline: Timeline, rank: int, scale: float, columns: int) -> Iterator[Piece]:
    """A row of actions: each its label and a space, or its letter where not all labels have room."""
    column = 0
    labels = _has_labels(timeline, scale)
    for action, start, end in timeline.spans[rank]:
        first, last = (round((time - timeline.start) * scale) for time in (start, end))
        first, last = max(first, column), max(last, column)
        if first > column:
            yield IDLE * (first - column), ""
        if last > first:
            text = label(timeline.schedule, action) if labels else action.kind
            yield text.ljust(last - first), action.kind
        column = last
    if columns > column:
        yield IDLE * (columns - column), ""


def _bars(levels: list[Level], most: int, start: float, scale: float, columns: int) -> str:
    """One bar for each column, of the count in its middle."""
    bars, count, left = "", 0, list(levels)
    for column in range(columns):
        middle = start + (column + 0.5) / scale
        while left and left[0].time <= middle:
            count = left.pop(0).number
        bars += BARS[-(-count * (len(BARS) - 1) // most)] if most else " "
    return bars
