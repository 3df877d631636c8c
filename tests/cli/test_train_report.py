"""What `colonnade train` shows and writes: progress, metrics.jsonl, the curve, the summary."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from colonnade.tools.train.curve import draw_curve
from colonnade.tools.train.report import PLAIN_LINES, Reporter, StepRecord, summary_lines


def record(step: int) -> StepRecord:
    return StepRecord(step, loss=5.0 / step, grad_norm=1.5, lr=1e-3, tokens_per_s=2048.0, elapsed=float(step))


def report(file, steps: int, terminal: bool) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=100)
    with Reporter(file, steps, console) as reporter:
        for step in range(1, steps + 1):
            reporter.step(record(step), held_out_loss=4.0 if step == steps else None)
        reporter.say("the end [of it]")
    return screen.getvalue()


def test_without_a_terminal_there_are_few_plain_lines(tmp_path):
    shown = report(tmp_path / "m", 200, terminal=False)
    assert "step   1/200  loss 5.0000  grad norm 1.500  lr 1.00e-03  2,048 tokens/s  1 s" in shown
    assert "step 200: held-out loss 4.0000" in shown
    assert "the end [of it]" in shown
    assert "\x1b" not in shown
    assert shown.count("grad norm") == PLAIN_LINES + 1


def test_on_a_terminal_there_is_a_progress_bar(tmp_path):
    shown = report(tmp_path / "m", 3, terminal=True)
    assert "3/3" in shown
    assert "loss 1.667" in shown
    assert "2,048 tokens/s" in shown


def test_every_step_is_one_line_of_metrics(tmp_path):
    report(tmp_path / "m", 5, terminal=False)
    lines = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert set(lines[0]) == {"step", "loss", "grad_norm", "lr", "tokens_per_s", "elapsed"}
    assert lines[-1]["held_out_loss"] == 4.0


def test_a_step_that_fp16_has_left_out_is_said_and_counted(tmp_path):
    screen = io.StringIO()
    with Reporter(tmp_path / "m", 2, Console(file=screen, width=200)) as reporter:
        reporter.step(replace(record(1), grad_norm=math.inf, loss_scale=32768.0))
        reporter.step(replace(record(2), loss_scale=32768.0))
    assert reporter.left_out == 1
    first, second = screen.getvalue().splitlines()
    assert first.endswith("loss scale 32768  left out: gradients overflowed") and second.endswith("loss scale 32768")
    left_out, made = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "m").read_text().splitlines()
    ]
    assert left_out["grad_norm"] is None and left_out["loss_scale"] == 32768 and made["grad_norm"] == 1.5


@pytest.mark.parametrize(("name", "begins"), [("loss.png", b"\x89PNG"), ("loss.svg", b"<?xml")])
def test_curve_is_drawn_without_a_display(tmp_path, name, begins):
    draw_curve(tmp_path / name, [3.0, 2.0, 1.0], [(0, 3.5), (3, 1.5)], 2.5, "title")
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_summary_says_on_which_side_of_the_unigram_entropy_the_loss_is():
    summary = {
        "held_out_loss": 4.0, "unigram_entropy": 6.0, "held_out_targets": 1000, "tp": 2, "dp": 2, "precision": "fp32",
        "parameters": 10, "seconds": 1.0, "steps": 5, "tokens_per_s": 100.0, "sample": "def f(", "output": "out",
    }  # fmt: skip
    text = "\n".join(summary_lines(summary))
    assert "4.0000 nats per token (perplexity 54.6) over 1,000 tokens, below the unigram entropy" in text
    assert "6.0000 nats per token" in text
    assert "AutoModelForCausalLM.from_pretrained('out')" in text
    assert "tp 2 × dp 2, fp32; 10 parameters" in text and "left out" not in text
    with_zero = "\n".join(summary_lines(summary | {"zero_stage": 1, "precision": "fp16", "steps_left_out": 2}))
    assert "tp 2 × dp 2, ZeRO-1, fp16; 10 parameters" in with_zero
    assert "left out         2 steps in which fp16 gradients overflowed" in with_zero
    assert "not below" in "\n".join(summary_lines(summary | {"held_out_loss": 7.0}))
