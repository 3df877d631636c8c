"""Checkpoints in a store: here fsspec's own view of the local disk, which several processes share."""

from pathlib import Path

import pytest
import torch
from resume_runs import BEFORE, Run, one_process

from colonnade.checkpoint import remote
from colonnade.errors import CheckpointError
from colonnade.testing.parity_report import compare_tensors, relative
from colonnade.testing.ranks import run_on_ranks

CASE = "llama, tied"


def save(layout, url):
    run = Run(layout, CASE)
    run.train(range(BEFORE - 1))
    run.save(url, step=BEFORE - 1)
    run.train([BEFORE - 1])
    run.save(url, asynchronous=True)
    run.booster.finish_saving()
    run.save(url, keep_last=2)  # the same step again


def go_on(layout, url, wanted):
    run = Run(layout, CASE, seed=9)
    assert run.load(url, verify=True) == run.load(url) == BEFORE
    losses = run.train(range(BEFORE, BEFORE + 3))
    assert max(relative(a, b) for a, b in zip(losses, wanted[0][BEFORE:])) <= 1e-5
    assert compare_tensors("weights", run.weights(), wanted[1], 1e-5).ok


@pytest.mark.parametrize("source, target", [(("zero 2", 2), ("tp 2", 2)), (("pp 2", 2), ("fsdp", 3))])
def test_a_training_goes_on_from_a_store(tmp_path, source, target):
    url = f"file://{tmp_path}/run"
    run_on_ranks(source[1], save, source[0], url)
    run_on_ranks(target[1], go_on, target[0], url, one_process(CASE))
    folders = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert [name[:13] for name in folders] == ["latest", "step-00000002", "step-00000003"]


def broken(url):
    run = Run("dp 2", CASE)
    run.save(url, step=1)
    real = remote.RemoteFolder.put

    def put(self, name, file):
        if torch.distributed.get_rank() == 1:
            raise OSError("the store is full")
        real(self, name, file)

    remote.RemoteFolder.put = put
    try:
        with pytest.raises(CheckpointError, match=r"(?s)not saved.*rank 1.*the store is full"):
            run.save(url, step=2)
    finally:
        remote.RemoteFolder.put = real
    assert run.load(url) == 1
    run.save(url, step=3)
    return sorted(p.name[:13] for p in Path(url.removeprefix("file://")).iterdir())


def test_a_save_that_fails_is_never_seen_and_cleared_by_the_next(tmp_path):
    names = run_on_ranks(2, broken, f"file://{tmp_path}/run")[0]
    assert names == ["latest", "step-00000001", "step-00000003"]


def nothing(url):
    run = Run("dp 1", CASE)
    with pytest.raises(CheckpointError, match="holds no training checkpoint"):
        run.load(url)
    with pytest.raises(CheckpointError, match=r"(?s)cannot be reached.*nosuchthing"):
        run.load("nosuchthing://a/b")
    run.save("memory://somewhere/run")
    assert run.load("memory://somewhere/run") == BEFORE
    files = remote.RemoteFolder("memory://somewhere/run")
    name = files.find()
    data = files.files.cat_file(f"{files.root}/{name}/rank-00000-of-00001.safetensors")
    files.files.pipe_file(f"{files.root}/{name}/rank-00000-of-00001.safetensors", data[:-9])
    with pytest.raises(CheckpointError, match=r"(?s)rank-00000-of-00001\.safetensors is damaged"):
        run.load("memory://somewhere/run")


def test_what_is_not_there_is_said(tmp_path):
    run_on_ranks(1, nothing, f"file://{tmp_path}/run")
