"""`colonnade run` with real processes: a clean run, ranks that fail in several ways, and mistakes in the call."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from colonnade.cli.main import main
from colonnade.cli.run import _culprit, _page

ROOT = Path(__file__).parents[2]
AFTER_FAILURE_S = 10
TIMEOUT_S = 20  # of the collectives; a rank that just ends is no failure yet, its peers have to run into it

JOB = """
import os, signal, sys, time
from pathlib import Path
import torch
from colonnade.cluster.launch import launch_from_torch
from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_reduce

fault, folder = sys.argv[1], Path(sys.argv[2])
launch_from_torch(timeout_s=float(os.environ["JOB_TIMEOUT_S"]))
launch_from_torch()  # a second call keeps the group
world = Axis.of(None, "world")
(folder / f"pid{world.rank}").write_text(str(os.getpid()))


def mark():
    (folder / "fault").write_text(str(time.time()))


model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    if step == 2 and fault == "wait":
        mark()
        time.sleep(60)
    if step == 2 and world.rank == 1 and fault in ("raise", "exit", "kill"):
        mark()
        if fault == "raise":
            raise RuntimeError("boom-17")
        os._exit(3) if fault == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    if step == 3 and world.rank == 0 and fault == "early":
        mark()
        break
    model(torch.full((2, 8), float(world.rank))).square().mean().backward()
    for parameter in model.parameters():
        all_reduce(parameter.grad, world)
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {world.rank} of {world.size}: {model.weight.sum().item()}\\n", end="")
"""


@dataclass
class Outcome:
    code: int
    out: str
    err: str
    seconds_after_fault: float
    left_alive: list[int]


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    (folder / "job.py").write_text(JOB)
    return subprocess.Popen(
        [sys.executable, "-m", "colonnade.cli.main", "run", "--nproc-per-node", "3", *arguments, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JOB_TIMEOUT_S": str(TIMEOUT_S)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *arguments: str) -> Outcome:
    out, err = (process := start(folder, *arguments)).communicate(timeout=90)
    fault = folder / "fault"
    seconds = time.time() - float(fault.read_text()) if fault.exists() else 0.0
    return Outcome(process.returncode, out, err, seconds, [p for p in pids(folder) if alive(p)])


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid*")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_clean_run_of_a_module_ends_with_0_and_says_nothing_more(tmp_path):
    outcome = run(tmp_path, "-m", "job", "none")
    assert outcome.code == 0, outcome.err
    weights = dict(line.split(": ") for line in outcome.out.splitlines())
    assert sorted(weights) == [f"rank {r} of 3" for r in range(3)]
    assert len(set(weights.values())) == 1
    assert outcome.err == ""
    assert len(pids(tmp_path)) == 3 and not outcome.left_alive


def test_a_rank_that_raises_ends_all_with_its_traceback_first(tmp_path):
    outcome = run(tmp_path, "job.py", "raise")
    assert outcome.code == 1
    assert outcome.seconds_after_fault < AFTER_FAILURE_S
    assert len(pids(tmp_path)) == 3 and not outcome.left_alive
    assert outcome.err.startswith("rank 1 of 3 failed: RuntimeError: boom-17\nTraceback (most recent call last):\n")
    assert outcome.err.count("Traceback") == 1
    page = outcome.err[outcome.err.index("colonnade run:") :]
    assert page.startswith("colonnade run: rank 1 of 3 failed after")
    assert "RuntimeError: boom-17" in page and "exit code 1" in page


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [("exit", 3, "exit code 3"), ("kill", 128 + signal.SIGKILL, "SIGKILL")],
    ids=["exit", "kill"],
)
def test_a_rank_that_is_gone_without_a_word_ends_all(tmp_path, fault, code, said):
    outcome = run(tmp_path, "job.py", fault)
    assert outcome.code == code
    assert outcome.seconds_after_fault < AFTER_FAILURE_S
    assert len(pids(tmp_path)) == 3 and not outcome.left_alive
    page = outcome.err[outcome.err.index("colonnade run:") :]
    assert page.startswith("colonnade run: rank 1 of 3 failed after")
    assert said in page


def test_a_rank_that_ends_one_step_early_is_named_with_the_collective(tmp_path):
    outcome = run(tmp_path, "job.py", "early")
    assert outcome.code == 1
    assert outcome.seconds_after_fault < TIMEOUT_S
    assert len(pids(tmp_path)) == 3 and not outcome.left_alive
    assert "CommunicationError: all_reduce over world (ranks 0, 1, 2) did not complete" in outcome.err
    assert "rank 0 had left the job before" in outcome.err


def test_ranks_end_when_the_launcher_is_killed(tmp_path):
    process = start(tmp_path, "job.py", "wait")
    deadline = time.monotonic() + 60
    while not (tmp_path / "fault").exists() or len(pids(tmp_path)) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.kill()
    _, err = process.communicate(timeout=AFTER_FAILURE_S)  # ends when the ranks, which hold the pipe too, have ended
    assert not [pid for pid in pids(tmp_path) if alive(pid)]
    assert err.count("stopped, because the process that started it has ended") == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc-per-node", "0", "job.py"], "--nproc-per-node 0: a job needs at least 1 process"),
        (["jbo.py"], "there is no script 'jbo.py' in"),
        (["-m", "no_such_module.train"], "there is no module 'no_such_module.train'"),
        (["--nnodes", "2", "job.py"], "--nnodes 2 needs --node-rank and --master-addr"),
        (["--nnodes", "0", "job.py"], "a job needs at least 1 machine"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "a", "job.py"], "with --nnodes 2 it is 0 to 1"),
    ],
)
def test_mistakes_are_explained_before_anything_starts(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("raise SystemExit('was started')")
    assert main(["run", *arguments]) == 2
    assert said in capsys.readouterr().err


def failure(folder: Path, rank: int, code: int, message: str | None = None, **extra) -> ProcessFailure:
    file = folder / f"error{rank}.json"
    if message is not None:
        file.write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": "1", **extra}}}))
    return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=code, error_file=str(file))


def test_the_rank_that_died_silently_comes_before_those_that_only_lost_it(tmp_path):
    failures = {
        0: failure(tmp_path, 0, 1, "CommunicationError: all_reduce", consequence=True),
        1: failure(tmp_path, 1, -signal.SIGTERM),
        2: failure(tmp_path, 2, -signal.SIGKILL),
    }
    assert _culprit(failures)[0] == 2
    page = _page(failures, 3, 4.0)
    assert "rank 2 of 3 failed after 4.0 s" in page and "SIGKILL" in page and "ranks 0, 1 ended with it" in page


def test_a_failure_on_another_machine_is_named_by_its_rank(tmp_path):
    message = "stopped, because rank 5 failed: RuntimeError: boom-17"
    page = _page({0: failure(tmp_path, 0, 1, message, consequence=True, cause_rank=5)}, 8, 4.0)
    assert "rank 5 of 8 failed" in page and "boom-17" in page and "the output on the machine of rank 5" in page


def test_a_misspelled_script_brings_the_near_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["run", "trian.py"]) == 2
    assert "try  train.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--help"], "run  "), (["run", "--help"], "--nproc-per-node 2 script.py")]
)
def test_help_shows_the_commands_and_an_example(capsys, arguments, said):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert said in text and "example" in text


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("colonnade ")
