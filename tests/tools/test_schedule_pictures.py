"""What `colonnade schedule` prints and draws, of simulated schedules and of measured runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from colonnade.errors import UsageError
from colonnade.pipeline.schedule import STYLES, make_schedule
from colonnade.pipeline.timeline import simulate
from colonnade.tools.schedule.svg import draw_svg
from colonnade.tools.schedule.text import plain_text, rich_text
from colonnade.tools.schedule.trace import read_trace

SVG = "{http://www.w3.org/2000/svg}"


def trace_of(style: str, ranks: int, microbatches: int, seconds: float = 0.01, offset: float = 0.0) -> dict:
    """As a run would write it, in which each unit took so long."""
    timeline = simulate(make_schedule(style, ranks, microbatches))
    events = [
        {"rank": rank} | action._asdict() | {"start": offset + start * seconds, "end": offset + end * seconds}
        for rank, spans in enumerate(timeline.spans)
        for action, start, end in spans
    ]
    chunks = timeline.schedule.chunks
    return {"style": style, "ranks": ranks, "microbatches": microbatches, "chunks": chunks, "events": events}


def written(folder: Path, content: object) -> Path:
    file = folder / "trace.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def cells(svg: str) -> list[tuple[str, float, float]]:
    """Hint, left edge and width of each action in a drawing."""
    found = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [(r[0].text or "", float(r.attrib["x"]), float(r.attrib["width"])) for r in found if len(r)]


def words_of(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_schedule_as_text():
    text = plain_text(simulate(make_schedule("1f1b", 2, 3)))
    assert text.splitlines() == [
        "1f1b · 2 ranks · 3 micro-batches",
        "one forward, one backward: fewer micro-batches in flight",
        "bubble 25.0 % of 12 units; 12.5 % between a rank's first action and its last",
        "",
        "rank 0  F0 F1 ······B0    F2 B1    ···B2      idle 25.0 %",
        "rank 1  ···F0 B0    F1 B1    F2 B2    ······  idle 25.0 %",
        "",
        "activations in flight (micro-batches × stages)",
        "rank 0  ▄▄▄████████████████████████▄▄▄▄▄▄▄▄▄  peak 2",
        "rank 1     ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄        peak 1",
        "",
        "kind, micro-batch: F forward, B backward",
    ]


def test_several_stages_on_a_rank_are_told_apart():
    text = plain_text(simulate(make_schedule("zbv", 2, 3)))
    assert "rank 0  0F0 0F1 0F2 3F0 3B0 3W0" in text
    assert "; 0 % between a rank's first action and its last" in text
    assert "stage, kind, micro-batch: F forward, B backward of the inputs, W gradient of the weights" in text


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("width", [60, 80, 100])
def test_text_fits_a_narrow_terminal(style, width):
    lines = plain_text(simulate(make_schedule(style, 4, 16)), width=width).splitlines()
    assert all(len(line) <= width for line in lines if line.startswith("rank"))
    assert len({len(line) for line in lines if "idle" in line and line.startswith("rank")}) == 1
    assert "too narrow for stages and micro-batches" in lines[-1]


def test_the_coloured_text_says_the_same():
    timeline = simulate(make_schedule("zbh1", 3, 4))
    assert [line.rstrip() for line in rich_text(timeline).plain.splitlines()] == plain_text(timeline).splitlines()


@pytest.mark.parametrize("style", STYLES)
def test_a_drawing_has_every_action_at_its_time(style):
    timeline = simulate(make_schedule(style, 4, 6))
    svg = draw_svg(timeline)
    found = cells(svg)
    spans = [span for of_rank in timeline.spans for span in of_rank]
    assert len(found) == len(spans)
    left = min(x for _, x, _ in found)
    scale = (max(x + width for _, x, width in found) - left) / timeline.makespan
    for (hint, x, width), (action, start, end) in zip(found, spans):
        assert f"stage {action.stage}, micro-batch {action.microbatch}: {start} to {end}" in hint
        assert x == pytest.approx(left + start * scale, abs=0.02)
        assert width == pytest.approx((end - start) * scale, abs=0.02)
    words = words_of(svg)
    assert any(word.startswith(f"{style} · 4 ranks · 6 micro-batches") for word in words)
    assert words.count("time in units of the costs") == 2
    assert [word for word in words if word.startswith("peak ")] == [
        f"peak {timeline.peak_in_flight(r)}" for r in range(4)
    ]
    assert ("W gradient of the weights" in words) == timeline.schedule.splits_backward


def test_stages_of_a_rank_have_different_shades():
    svg = draw_svg(simulate(make_schedule("interleaved", 2, 2, 3)))
    colours = {r.attrib["fill"] for r in ElementTree.fromstring(svg).iter(f"{SVG}rect") if len(r)}
    assert len(colours) == 6


def test_numbers_are_left_out_where_they_have_no_room():
    words = words_of(draw_svg(simulate(make_schedule("zbv", 8, 64))))
    assert "64 micro-batches" in words[0]
    assert "63" not in words


def test_nothing_takes_any_time():
    timeline = simulate(make_schedule("1f1b", 2, 2), {"F": 0, "B": 0, "W": 0})
    assert "bubble 0 % of 0 units" in plain_text(timeline, width=80)
    ElementTree.fromstring(draw_svg(timeline))


def test_forwards_alone():
    timeline = simulate(make_schedule("zbv", 3, 3, forward_only=True))
    assert "in flight" not in plain_text(timeline)
    assert words_of(draw_svg(timeline)).count("time in units of the costs") == 1


@pytest.mark.parametrize("style", STYLES)
def test_a_measured_run_is_read_back(style, tmp_path):
    timeline = read_trace(written(tmp_path, trace_of(style, 3, 4, seconds=0.01, offset=77.0)))
    simulated = simulate(make_schedule(style, 3, 4))
    assert timeline.schedule == simulated.schedule
    assert timeline.makespan == pytest.approx(simulated.makespan * 0.01)
    assert timeline.idle_share == pytest.approx(simulated.idle_share)
    text = plain_text(timeline, measured=True, width=100)
    assert "measured · " in text
    assert re.search(r"idle \d+\.\d % of 0\.\d+ s; ", text)
    words = words_of(draw_svg(timeline, measured=True))
    assert words.count("time in seconds") == 2
    assert "0" in words


def test_what_is_kept_in_a_measured_run_is_counted_on_its_own_clock(tmp_path):
    trace = trace_of("1f1b", 2, 3, seconds=0.013, offset=1e6)
    timeline = read_trace(written(tmp_path, trace))
    assert [timeline.peak_in_flight(r) for r in range(2)] == [2, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: "{", ["is no JSON"]),
        (lambda t: [], ["found", "a list, not an object", "save_trace"]),
        (lambda t: {k: v for k, v in t.items() if k != "style"}, ["style", "is missing"]),
        (lambda t: t | {"events": []}, ["events", "no list of actions"]),
        (lambda t: t | {"events": 3}, ["events", "no list of actions"]),
        (lambda t: t | {"events": [1]}, ["events[0]", "not an object"]),
        (lambda t: t | {"events": [{"rank": 0}]}, ["kind, stage, microbatch, start, end: missing"]),
        (lambda t: t | {"ranks": 1}, ["events[", "rank 1 from"]),
        (lambda t: t | {"ranks": "2"}, ["ranks", "is '2', not a number"]),
        (lambda t: t | {"style": "abc"}, ["no pipeline schedule 'abc'"]),
        (lambda t: t | {"style": ["1f1b"]}, ["style", "not a text"]),
        (lambda t: t | {"events": t["events"][1:]}, ["not a whole run", "0F0  is missing on rank 0"]),
        (lambda t: t | {"microbatches": 4}, ["not a whole run", "is missing"]),
    ],
)
def test_a_file_that_is_no_trace_is_refused(change, words, tmp_path):
    file = written(tmp_path, change(trace_of("1f1b", 2, 3)))
    with pytest.raises(UsageError) as caught:
        read_trace(file)
    assert all(word in str(caught.value) for word in [str(file), *words]), caught.value


def test_a_trace_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_trace(tmp_path / "nothing.json")
