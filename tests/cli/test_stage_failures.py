"""A stage of a pipeline that fails, in real processes started by `colonnade run`: the job ends within seconds, and says why."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AFTER_FAILURE_S = 10

JOB = """
import os, signal, sys, time
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin

fault, style, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
colonnade.launch_from_torch()
rank = torch.distributed.get_rank()
(folder / f"pid{rank}").write_text(str(os.getpid()))
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=67, use_cache=False, **sizes))
calls = [0]
spoilt = (1, 2) if style == "zbv" else (3,)  # layers of rank 1: of a V the two stages in the middle, else the last


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        act()
        return grad


def act():
    calls[0] += 1
    if calls[0] < 6 * len(spoilt):  # in the middle of the second step
        return
    (folder / "fault").write_text(str(time.time()))
    if fault == "exit":
        os._exit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("boom-17")


def forward_hook(module, args, output):
    if fault == "backward":
        return Fails.apply(output)
    act()


for number in spoilt:
    model.model.layers[number].mlp.register_forward_hook(forward_hook)
booster = Booster(plugin=HybridParallelPlugin(pp_size=2, pp_style=style, num_microbatches=4, precision="fp32"))
model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
x = torch.randint(0, 67, (8, 12))
for _ in range(4):
    print(booster.execute_pipeline(iter([{"input_ids": x, "labels": x}]), model, None, optimizer)["loss"].item())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.sample("forward-1f1b", "backward-zbv", "kill-1f1b")
@pytest.mark.parametrize("style", ["1f1b", "zbv"])
@pytest.mark.parametrize("fault", ["forward", "backward", "exit", "kill"])
def test_a_stage_that_fails_ends_the_job_with_its_own_words(tmp_path, fault, style):
    (tmp_path / "job.py").write_text(JOB)
    process = subprocess.run(
        [sys.executable, "-m", "colonnade.cli.main", "run", "--nproc-per-node", "2", "job.py", fault, style, str(tmp_path)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    ended = time.time()
    err = process.stderr
    assert (tmp_path / "fault").exists(), err
    assert ended - float((tmp_path / "fault").read_text()) < AFTER_FAILURE_S
    for file in tmp_path.glob("pid*"):
        assert not Path(f"/proc/{file.read_text()}").exists()
    page = err[err.index("colonnade run:") :]
    assert "rank 1 of 2 failed" in page
    if fault in ("exit", "kill"):
        assert process.returncode == (3 if fault == "exit" else 128 + signal.SIGKILL)
        assert "SIGKILL" in page or "exit code 3" in page
        return
    assert process.returncode == 1
    first = err.index("Traceback")
    assert "boom-17" in err[:first] and err.count("Traceback") == 1
    assert "RuntimeError: boom-17" in page
