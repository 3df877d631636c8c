"""The scripts in examples/ run by the command in their first line, and do what they say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# starting processes that each import torch and transformers takes a minute together
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
]  # processes that each import torch and transformers, on whatever machine


def run(name: str, folder: Path, *arguments: str) -> str:
    """What a script prints, started on two processes in a folder of its own."""
    folder.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "colonnade.cli.main",
        "run",
        "--nproc-per-node",
        "2",
        str(ROOT / "examples" / name),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=250, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.name)
def test_a_script_says_in_its_first_line_how_it_is_started(script):
    [command] = re.findall(r"^\"\"\".*: (colonnade run .*?)(?:\"\"\")?$", script.read_text().splitlines()[0])
    words = shlex.split(command)
    assert words[:5] == ["colonnade", "run", "--nproc-per-node", "2", f"examples/{script.name}"]


def test_adapters_are_trained_and_plain_peft_computes_the_same_with_them(tmp_path):
    said = run("lora.py", tmp_path)
    without, by_peft, here = map(float, re.findall(r"loss (\S+) without adapters, (\S+) with .*, (\S+) here", said)[0])
    assert by_peft < 0.95 * without
    assert abs(by_peft - here) <= 1e-3  # printed with three digits
    assert "trainable params: 3,584 || all params: 118,592" in said
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_a_training_that_is_gone_on_with_is_the_one_that_was_not_interrupted(tmp_path):
    at_once = losses(run("zero_and_resume.py", tmp_path / "at once", "14"))
    twice = losses(run("zero_and_resume.py", tmp_path / "twice", "9"))
    twice |= losses(run("zero_and_resume.py", tmp_path / "twice", "5"))
    assert list(at_once) == list(twice) == list(range(1, 15))
    for step, loss in at_once.items():
        assert abs(twice[step] - loss) <= 1e-5 * loss, step


def losses(said: str) -> dict[int, float]:
    return {
        int(step): float(loss) for step, loss in re.findall(r"^step (\d+): epoch \d+, loss (\S+)$", said, re.MULTILINE)
    }
