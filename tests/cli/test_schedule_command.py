"""`colonnade schedule`: its arguments, what it prints and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colonnade.cli.main import main
from colonnade.pipeline.schedule import STYLES, make_schedule
from colonnade.pipeline.timeline import simulate


def run(capsys: pytest.CaptureFixture, arguments: str) -> tuple[int, str, str]:
    code = main(["schedule", *arguments.split()])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_printed_and_drawn(style, tmp_path, capsys):
    file = tmp_path / "schedule.svg"
    code, out, _ = run(capsys, f"--pp 4 --microbatches 8 --style {style} --out {file}")
    assert code == 0
    assert out.startswith(f"{style} · 4 ranks · 8 micro-batches")
    assert f"drawing: {file}" in out
    assert file.read_text().startswith("<svg")


def test_costs_chunks_and_transfers_are_used(capsys):
    code, out, _ = run(
        capsys, "--pp 2 --microbatches 4 --style interleaved --chunks 3 --costs F=2,B=3,W=1 --transfer 0.5"
    )
    assert code == 0
    made = simulate(make_schedule("interleaved", 2, 4, 3), {"F": 2, "B": 3, "W": 1}, 0.5)
    assert f"of {made.makespan:.4g} units" in out
    assert "3 stages on each rank" in out


def test_forward_only(capsys):
    code, out, _ = run(capsys, "--pp 2 --microbatches 3 --forward-only")
    assert code == 0
    assert "of 4 units" in out
    assert "backward\n" not in out.splitlines()[-1]


def test_a_measured_run(tmp_path, capsys):
    timeline = simulate(make_schedule("zbv", 2, 4))
    events = [
        {"rank": rank} | action._asdict() | {"start": start / 8, "end": end / 8}
        for rank, spans in enumerate(timeline.spans)
        for action, start, end in spans
    ]
    trace, file = tmp_path / "trace.json", tmp_path / "run.svg"
    trace.write_text(json.dumps({"style": "zbv", "ranks": 2, "microbatches": 4, "chunks": 2, "events": events}))
    code, out, _ = run(capsys, f"--trace {trace} --out {file}")
    assert code == 0
    assert "measured · " in out
    assert "idle 4.0 % of 3.125 s" in out
    assert "time in seconds" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ["--pp and --microbatches: not given", "--trace FILE"]),
        ("--pp 4", ["--microbatches: not given"]),
        ("--pp 0 --microbatches 0", ["--pp 0 and --microbatches 0", "at least 1"]),
        ("--pp 2 --microbatches 2 --style zb", ["--style", "no pipeline schedule 'zb'", "zbv  "]),
        ("--pp 2 --microbatches 2 --chunks 2", ["1f1b cannot work with 2 stages", "interleaved or zbv"]),
        ("--pp 2 --microbatches 2 --costs F=1,X=2", ["--costs F=1,X=2", "'X=2'", "try    --costs F=1,B=1.2,W=0.8"]),
        ("--pp 2 --microbatches 2 --costs F", ["'F' is no duration"]),
        ("--pp 2 --microbatches 2 --costs F=-1", ["'F=-1'"]),
        ("--pp 2 --microbatches 2 --costs F=inf", ["'F=inf'"]),
        ("--pp 2 --microbatches 2 --transfer -1", ["transfer", "-1.0"]),
        ("--pp 2 --microbatches 2 --out a.png", ["--out a.png", "--out a.svg"]),
        ("--pp 2 --microbatches 2 --out nowhere/a.svg", ["there is no folder", "nowhere"]),
        ("--trace nothing.json", ["--trace nothing.json: No such file"]),
        ("--trace nothing.json --pp 2 --forward-only", ["--trace together with --pp, --forward-only"]),
    ],
)
def test_arguments_that_cannot_be(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, arguments)
    assert code == 2
    assert not out
    assert all(word in err for word in words), err
    assert not list(Path(tmp_path).iterdir())


def test_a_drawing_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "a.svg").mkdir()
    code, _, err = run(capsys, f"--pp 2 --microbatches 2 --out {tmp_path / 'a.svg'}")
    assert code == 2
    assert "Is a directory" in err


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["schedule", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "colonnade schedule --pp 4 --microbatches 8 --style zbv --out" in out.replace("a.svg", "")
