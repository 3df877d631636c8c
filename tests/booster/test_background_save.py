"""Saving beside the training: what is written is the state at the call, and errors come out at the next call or at the end."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from resume_runs import BEFORE, Run, same_bits, weights

from colonnade.checkpoint import training_save
from colonnade.errors import CheckpointError
from colonnade.testing.parity_report import relative
from colonnade.testing.ranks import run_on_ranks

CASE = "llama, tied"


def beside(folder):
    """What is saved is the state at the call, whatever the training does meanwhile; collectives of both get along."""
    run = Run("zero 2", CASE)
    begun, go_on = threading.Event(), threading.Event()
    real = training_save._write_own

    def slow(snapshot, file, meanwhile):
        begun.set()
        assert go_on.wait(30)
        return real(snapshot, file, meanwhile)

    training_save._write_own = slow
    try:
        run.train(range(BEFORE))
        wanted = weights(run)
        path = run.save(folder, asynchronous=True)
        assert begun.wait(30) and not path.exists()
        losses = run.train(range(BEFORE, 6))  # the save is under way
        assert not path.exists()
        go_on.set()
        run.booster.finish_saving()
    finally:
        training_save._write_own = real
    assert path.is_dir()
    again = Run("tp 2", CASE, seed=9)
    assert again.load(folder) == BEFORE
    same_bits(weights(again), wanted)
    assert max(relative(a, b) for a, b in zip(again.train(range(BEFORE, 6)), losses)) <= 1e-5


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    run_on_ranks(2, beside, str(tmp_path))


def fails_beside(folder):
    run = Run("dp 2", CASE)
    run.save(folder, step=1)
    real = training_save._write_own

    def fail(snapshot, file, meanwhile):
        if torch.distributed.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return real(snapshot, file, meanwhile)

    training_save._write_own = fail
    try:
        for again in (lambda: run.save(folder, step=3), lambda: run.load(folder), run.booster.finish_saving):
            run.save(folder, step=2, asynchronous=True)
            with pytest.raises(CheckpointError, match=r"(?s)not saved.*rank 1.*No space left"):
                again()
    finally:
        training_save._write_own = real
    assert run.load(folder) == 1
    run.save(folder, step=3)
    assert run.load(folder) == 3


def test_errors_of_the_background_come_out_at_the_next_call(tmp_path):
    run_on_ranks(2, fails_beside, str(tmp_path))


JOB = """
import sys, torch, colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import TorchDDPPlugin
from colonnade.checkpoint import manifest as checkpoint_manifest
from colonnade.checkpoint import training_save

colonnade.launch_from_torch()
booster = Booster(plugin=TorchDDPPlugin(precision="fp32"))
model = torch.nn.Linear(300, 300)
model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
real = training_save._write_own
def write(snapshot, file, meanwhile):
    if sys.argv[1] == "fail" and torch.distributed.get_rank() == 1:
        raise OSError(28, "No space left on device")
    return real(snapshot, file, meanwhile)
training_save._write_own = write
booster.save("run", model, optimizer, step=4, asynchronous=True)
"""


@pytest.mark.parametrize("fault", ["none", "fail"])
def test_a_program_does_not_end_before_its_last_save(tmp_path, fault):
    (tmp_path / "job.py").write_text(JOB)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "colonnade.cli.main", "run", "--nproc-per-node", "2", "job.py", fault],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    if fault == "none":
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "run" / "latest").read_text() == "step-00000004\n"
    else:
        assert done.returncode == 1 and "No space left on device" in done.stderr
        assert list((tmp_path / "run").iterdir()) == []
