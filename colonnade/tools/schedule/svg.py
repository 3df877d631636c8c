"""A schedule as a drawing: what each rank does when, and under it what it keeps. SVG written out, no library needed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from colonnade.pipeline.timeline import Level, Span, Timeline
from colonnade.tools.schedule.words import (
    IN_FLIGHT,
    WEIGHTS_DUE,
    chunk_of,
    idea,
    idle_line,
    kind_names,
    number,
    rank_rows,
    title,
)

# Lengths in pixels.
LEFT, RIGHT, TOP = 84, 96, 118  # around the plots
ROW, ROW_GAP = 28, 5  # of the actions of a rank
STRIP, STRIP_GAP = 34, 8  # of what a rank keeps
CELL = 25  # of the shortest action, where that makes the drawing no wider than
WIDEST = 1800
NARROWEST = 620
DIGIT = 0.64  # of the numbers in the cells, for each pixel of the font

SHADES = {  # of the first stage of a rank and of its last
    "F": ((158, 202, 241), (33, 102, 172)),
    "B": ((166, 219, 160), (27, 120, 55)),
    "W": ((253, 208, 142), (200, 90, 10)),
}
INK, GREY, PALE, LINE = "#1f2933", "#5f6b7a", "#eef1f4", "#d5dbe1"


def draw_svg(timeline: Timeline, measured: bool = False) -> str:
    """The text of an SVG file.

    Args:
        measured: times are seconds of a run, not units of a simulation.
    """
    return _Drawing(timeline, measured).whole()


class _Drawing:
    def __init__(self, timeline: Timeline, measured: bool) -> None:
        self.timeline, self.measured, self.schedule = timeline, measured, timeline.schedule
        lengths = [s.end - s.start for of_rank in timeline.spans for s in of_rank if s.end > s.start]
        shortest = min(lengths, default=1)
        wanted = CELL * timeline.makespan / shortest if not measured else WIDEST * 0.7
        self.plot = min(WIDEST, max(NARROWEST, wanted))
        self.scale = self.plot / (timeline.makespan or 1)
        self.width = LEFT + self.plot + RIGHT
        self.actions_end = TOP + self.schedule.ranks * (ROW + ROW_GAP)
        self.strips = self.actions_end + 86
        self.strips_end = self.strips + self.schedule.ranks * (STRIP + STRIP_GAP)
        self.height = self.strips_end + (52 if not self.schedule.forward_only else 0)

    def whole(self) -> str:
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {self.height:.0f}" '
            f'width="{self.width:.0f}" height="{self.height:.0f}" font-family="Helvetica, Arial, sans-serif">',
            f"<title>{escape(title(self.schedule))}</title>",
            '<rect width="100%" height="100%" fill="white"/>',
            *self.head(),
            *self.actions(),
            *self.axis(self.actions_end),
        ]
        if not self.schedule.forward_only:
            parts += [*self.kept(), *self.axis(self.strips_end)]
        return "\n".join([*parts, "</svg>", ""])

    def x(self, time: float) -> float:
        return LEFT + (time - self.timeline.start) * self.scale

    def head(self) -> Iterator[str]:
        """Title, idle time and legend."""
        yield _text(LEFT, 32, title(self.schedule), 18, INK, "bold")
        yield _text(LEFT, 53, idea(self.schedule, self.measured), 13, GREY)
        yield _text(LEFT, 72, idle_line(self.timeline, self.measured), 13, INK)
        x = float(LEFT)
        for kind, name in kind_names(self.schedule).items():
            for chunk in range(self.schedule.chunks):
                yield _rect(x, 86, 16, 14, self.shade(kind, chunk))
                x += 17
            caption = f"{kind} {name}"
            yield _text(x + 5, 98, caption, 12, INK)
            x += 5 + 6.4 * len(caption) + 20
        yield _rect(x, 86, 16, 14, PALE)
        yield _text(x + 22, 98, "idle", 12, INK)
        if self.schedule.chunks > 1:
            yield _text(x + 62, 98, "light to dark: from the first to the last stage of a rank", 12, GREY)

    def actions(self) -> Iterator[str]:
        """A row for each rank."""
        for rank, (name, idle, _) in enumerate(rank_rows(self.timeline)):
            y = TOP + rank * (ROW + ROW_GAP)
            yield _rect(LEFT, y, self.plot, ROW, PALE)
            yield _text(LEFT - 10, y + ROW / 2 + 4, name, 13, INK, anchor="end")
            yield _text(LEFT + self.plot + 10, y + ROW / 2 + 4, idle, 12, GREY)
            for span in self.timeline.spans[rank]:
                yield from self.cell(span, y)

    def cell(self, span: Span, y: float) -> Iterator[str]:
        action, start, end = span
        width = (end - start) * self.scale
        colour = self.shade(action.kind, chunk_of(self.schedule, action))
        name = kind_names(self.schedule)[action.kind]
        hint = f"{name}, stage {action.stage}, micro-batch {action.microbatch}: {number(start)} to {number(end)}"
        yield _rect(self.x(start), y, width, ROW, colour, hint)
        text = str(action.microbatch)
        size = min(12, int((width - 3) / (DIGIT * len(text))))
        if size >= 7:
            ink = "white" if _is_dark(colour) else INK
            yield _text(self.x(start) + width / 2, y + ROW / 2 + 0.35 * size, text, size, ink, anchor="middle")

    def shade(self, kind: str, chunk: int) -> str:
        share = chunk / (self.schedule.chunks - 1) if self.schedule.chunks > 1 else 0.35
        mixed = [round(a + (b - a) * share) for a, b in zip(*SHADES[kind])]
        return "#" + "".join(f"{value:02x}" for value in mixed)

    def axis(self, y: float) -> Iterator[str]:
        """Times, under a plot."""
        step = _step(self.timeline.makespan, self.plot / 60)
        for tick in range(math.floor(self.timeline.makespan / step + 1e-9) + 1):
            x = LEFT + tick * step * self.scale
            yield f'<line x1="{x:.2f}" y1="{y:.2f}" x2="{x:.2f}" y2="{y + 5:.2f}" stroke="{GREY}"/>'
            yield _text(x, y + 18, number(tick * step), 11, GREY, anchor="middle")
        yield f'<line x1="{LEFT}" y1="{y:.2f}" x2="{LEFT + self.plot:.2f}" y2="{y:.2f}" stroke="{GREY}"/>'
        unit = "time in seconds" if self.measured else "time in units of the costs"
        yield _text(LEFT + self.plot / 2, y + 36, unit, 12, GREY, anchor="middle")

    def kept(self) -> Iterator[str]:
        """A strip for each rank: what is in flight, and on top of it what is kept for "W"."""
        y = self.strips - 16
        yield _text(LEFT, y, IN_FLIGHT, 13, INK, "bold")
        if self.schedule.splits_backward:
            yield _rect(LEFT + 370, y - 11, 16, 14, self.shade("W", 0))
            yield _text(LEFT + 392, y, WEIGHTS_DUE, 12, INK)
        kept = [self.levels(rank) for rank in range(self.schedule.ranks)]
        most = max(1, *(count for whole, _ in kept for _, count in whole))
        for rank, (name, _, peak) in enumerate(rank_rows(self.timeline)):
            bottom = self.strips + rank * (STRIP + STRIP_GAP) + STRIP
            whole, in_flight = kept[rank]
            yield _rect(LEFT, bottom - STRIP, self.plot, STRIP, PALE)
            yield self.area(whole, bottom, most, self.shade("W", 0))
            yield self.area(in_flight, bottom, most, self.shade("F", 0))
            yield _text(LEFT - 10, bottom - STRIP / 2 + 4, name, 13, INK, anchor="end")
            yield _text(LEFT + self.plot + 10, bottom - STRIP / 2 + 4, peak, 12, INK)

    def levels(self, rank: int) -> tuple[list[Level], list[Level]]:
        """All that a rank keeps, and the part of it that is in flight."""
        in_flight, due = self.timeline.in_flight(rank), self.timeline.weights_due(rank)
        times = sorted({level.time for level in [*in_flight, *due]})
        return [Level(time, _at(in_flight, time) + _at(due, time)) for time in times], in_flight

    def area(self, levels: list[Level], bottom: float, most: int, colour: str) -> str:
        points: list[tuple[float, float]] = [(LEFT, bottom)]
        for time, count in levels:
            points += [(self.x(time), points[-1][1]), (self.x(time), bottom - STRIP * count / most)]
        points += [(LEFT + self.plot, points[-1][1]), (LEFT + self.plot, bottom)]
        return f'<polygon points="{" ".join(f"{x:.2f},{y:.2f}" for x, y in points)}" fill="{colour}"/>'


def _at(levels: list[Level], time: float) -> int:
    return next((level.number for level in reversed(levels) if level.time <= time), 0)


def _step(length: float, most: float) -> float:
    """A round distance between ticks, of which at most so many fit."""
    least = max(length, 1e-12) / max(1, most)
    power = 10 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 140


def _rect(x: float, y: float, width: float, height: float, colour: str, hint: str = "") -> str:
    edge = ' stroke="white"' if hint else ""
    shape = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{colour}"{edge}'
    return f"{shape}><title>{escape(hint)}</title></rect>" if hint else f"{shape}/>"


def _text(x: float, y: float, text: str, size: int, colour: str, weight: str = "normal", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" fill="{colour}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )
