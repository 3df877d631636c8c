"""Joining a job, seeds and loggers; and that a failure reaches a rank that is busy, without any launcher."""

import logging
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch

from colonnade.cluster.failure import _is_consequence, _summary
from colonnade.cluster.launch import launch, launch_from_torch
from colonnade.cluster.log import get_logger
from colonnade.cluster.seed import seed_all
from colonnade.errors import CommunicationError, UsageError

ROOT = Path(__file__).parents[2]

JOB = """
import os, random, sys, time
import torch
import torch.distributed as dist
from colonnade.cluster.launch import launch

fault, rank, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
launch(rank, 2, "127.0.0.1", port, seed=5, timeout_s=20)
print(dist.get_rank(), dist.get_world_size(), dist.get_backend(), random.random(), torch.rand(()).item())
dist.barrier()
if fault == "raise" and rank == 1:
    raise ValueError("boom-17")
if fault == "raise":
    time.sleep(60)
"""


def run_pair(fault: str) -> tuple[list[int], list[str], list[str], float]:
    """Exit codes, outputs and errors of two ranks started by hand, and the seconds from the first end to the last."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, fault, str(rank), str(port)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    while all(p.poll() is None for p in ranks):
        time.sleep(0.05)
    first_end = time.monotonic()
    texts = [p.communicate(timeout=60) for p in ranks]
    seconds = time.monotonic() - first_end
    return [p.returncode for p in ranks], [t[0] for t in texts], [t[1] for t in texts], seconds


def test_two_processes_started_by_hand_join_with_the_same_seed():
    codes, outs, errs, _ = run_pair("none")
    assert codes == [0, 0]
    assert errs == ["", ""]
    lines = [out.split() for out in outs]
    assert [line[:3] for line in lines] == [["0", "2", "gloo"], ["1", "2", "gloo"]]
    random.seed(5)
    torch.manual_seed(5)
    assert [line[3:] for line in lines] == [[str(random.random()), str(torch.rand(()).item())]] * 2


def test_a_failure_ends_a_peer_that_is_busy():
    codes, _, errs, seconds = run_pair("raise")
    assert codes == [1, 1]
    assert seconds < 10
    assert errs[0] == "rank 0: stopped, because rank 1 failed: ValueError: boom-17\n"
    assert errs[1].startswith("rank 1 of 2 failed: ValueError: boom-17\nTraceback (most recent call last):\n")


def test_without_torchrun_the_error_says_how_to_start(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="colonnade run --nproc-per-node 2 script.py"):
        launch_from_torch()


def test_an_environment_that_is_no_number_is_named(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UsageError, match="WORLD_SIZE='two'"):
        launch_from_torch()


def test_all_wrong_numbers_are_listed_at_once():
    with pytest.raises(UsageError) as error:
        launch(2, 2, "127.0.0.1", 70000, timeout_s=0)
    for name in ("rank", "local_rank", "port", "timeout_s"):
        assert f"\n  {name}  " in str(error.value)


def test_a_group_that_exists_is_kept(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group, hook = torch.distributed.group.WORLD, sys.excepthook
        launch(0, 1, "127.0.0.1", 1, seed=3)
        assert torch.distributed.group.WORLD is group and sys.excepthook is hook
        assert torch.initial_seed() == 3
    finally:
        torch.distributed.destroy_process_group()


def test_seed_all_seeds_every_generator():
    draws = []
    for _ in range(2):
        seed_all(7)
        draws.append((random.random(), numpy.random.rand(), torch.rand(()).item()))
    assert draws[0] == draws[1]


def test_a_logger_speaks_on_the_chosen_ranks(capsys):
    speaks = get_logger("test_launch.first")
    silent = get_logger("test_launch.second", ranks=[1, 2])
    speaks.handlers[0].setStream(sys.stderr)
    silent.handlers[0].setStream(sys.stderr)
    speaks.info("once")
    silent.warning("not here")
    text = capsys.readouterr().err
    assert "rank 0] once" in text and "not here" not in text
    get_logger("test_launch.second", ranks=None).warning("everywhere")
    assert "everywhere" in capsys.readouterr().err
    assert len(logging.getLogger("test_launch.second").handlers) == 1


def test_errors_that_come_from_a_missing_peer_are_told_from_others():
    try:
        try:
            raise CommunicationError("all_reduce over tp did not complete")
        except CommunicationError as error:
            raise ValueError("while training") from error
    except ValueError as error:
        assert _is_consequence(error)
    assert _is_consequence(RuntimeError("[…/gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not _is_consequence(RuntimeError("boom-17"))
    assert _summary(ValueError("first line\nsecond line")) == "ValueError: first line"
    assert _summary(KeyboardInterrupt()) == "KeyboardInterrupt"
