"""A measured run, read from the file that the pipeline wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colonnade.errors import ConfigError, UsageError, explain
from colonnade.pipeline.action import Action
from colonnade.pipeline.schedule import STYLES, Schedule, check, make_schedule
from colonnade.pipeline.timeline import Span, Timeline

EVENT: dict[str, type | tuple[type, ...]] = {
    "rank": int,
    "kind": str,
    "stage": int,
    "microbatch": int,
    "start": (int, float),
    "end": (int, float),
}


def read_trace(file: Path) -> Timeline:
    """The timeline of a run, in seconds from the start of its first action.

    Args:
        file: JSON, {"style", "ranks", "microbatches", "chunks", "events": [{"rank", "kind", "stage", "microbatch",
            "start", "end"}, …]}; what `model.pipeline.save_trace(file)` writes.

    Raises:
        UsageError: it cannot be read, is no such file, or actions of the schedule are missing in it.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--trace {file}: {error.strerror or error}.") from error
    except ValueError as error:
        raise UsageError(f"--trace {file} is no JSON: {error}.") from error
    problems = list(_problems(found))
    if problems:
        written = ("try", "a file that model.pipeline.save_trace(file) has written")
        raise UsageError(explain(f"--trace {file} is no trace of a pipeline.", [*problems[:5], written]))
    try:
        timeline = _timeline(found)
        check(timeline.schedule)
    except ConfigError as error:
        raise UsageError(f"--trace {file} is not a whole run of its schedule. {error}") from error
    return timeline


def _problems(found: Any) -> Iterator[tuple[str, str]]:
    """What is wrong with the form, as rows of a message."""
    if not isinstance(found, dict):
        yield "found", f"a {type(found).__name__}, not an object"
        return
    for key in ("style", "ranks", "microbatches", "chunks"):
        kind, name = (str, "text") if key == "style" else (int, "number")
        if not isinstance(found.get(key), kind):
            yield key, f"is {found[key]!r}, not a {name}" if key in found else "is missing"
            return
    events = found.get("events")
    if not isinstance(events, list) or not events:
        yield "events", "is no list of actions"
        return
    for index, event in enumerate(events):
        if not isinstance(event, dict):
            yield f"events[{index}]", f"is {event!r}, not an object"
            continue
        wrong = [key for key, kind in EVENT.items() if not isinstance(event.get(key), kind)]
        if wrong:
            yield f"events[{index}]", f"{', '.join(wrong)}: missing or of a wrong type"
        elif not 0 <= event["rank"] < found["ranks"] or event["end"] < event["start"]:
            yield f"events[{index}]", f"rank {event['rank']} from {event['start']} to {event['end']} cannot be"


def _timeline(found: dict[str, Any]) -> Timeline:
    events = sorted(found["events"], key=lambda event: (event["start"], event["end"]))
    begin = events[0]["start"]
    spans: list[list[Span]] = [[] for _ in range(found["ranks"])]
    for event in events:
        action = Action(event["kind"], event["stage"], event["microbatch"])
        spans[event["rank"]].append(Span(action, event["start"] - begin, event["end"] - begin))
    style, ranks, microbatches, chunks = (found[key] for key in ("style", "ranks", "microbatches", "chunks"))
    make_schedule(style, ranks, microbatches, chunks)  # raises for what cannot be
    actions = tuple(tuple(span.action for span in of_rank) for of_rank in spans)
    forward_only = all(event["kind"] == "F" for event in events)
    splits = STYLES[style].splits_backward
    schedule = Schedule(style, ranks, microbatches, chunks, splits, actions, forward_only)
    return Timeline(schedule, tuple(map(tuple, spans)))
