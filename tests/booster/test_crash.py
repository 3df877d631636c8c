"""A save that dies at any moment, of any rank, leaves the last checkpoint as it was, bit for bit, and nothing takes long.

Each checkpoint holds one number in all its entries, of weights and of the optimizer's state: that of its step. So whatever is
loaded tells which step it is of, and a mixture shows.
"""

import os
import random
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from colonnade.booster import Booster
from colonnade.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colonnade.checkpoint import staged_folder, tensor_file
from colonnade.checkpoint.root import LATEST, find_checkpoint, steps_in
from colonnade.checkpoint.training_load import open_checkpoint, read_into
from colonnade.cluster.mesh import Axis
from colonnade.errors import CheckpointError
from colonnade.model.pieces import Piece
from colonnade.precision.state import Shard
from colonnade.testing.ranks import RankFailure, run_on_ranks

PLUGINS = {"ddp": TorchDDPPlugin, "zero": LowLevelZeroPlugin}


class Numbers(nn.Module):
    """Some parameters of different sizes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(190, 200) for _ in range(6))

    def forward(self, x):
        return sum(layer(x).sum() for layer in self.layers)


class Job:
    """A training whose state can be set to a number."""

    def __init__(self, plugin):
        self.booster = Booster(plugin=PLUGINS[plugin](precision="fp32"))
        model = Numbers()
        self.model, self.optimizer, *_ = self.booster.boost(model, AdamW(model.parameters(), lr=0.0, weight_decay=0.0))
        self.booster.backward(self.model(torch.ones(1, 190)), self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def fill(self, number):
        for param in self.model.parameters():
            param.fill_(number)
        for state in self.optimizer.states():
            for shard in state.tensors.values():
                for piece in shard.pieces:
                    piece.tensor.fill_(number)

    def save(self, folder, number, **options):
        self.fill(number)
        return self.booster.save(folder, self.model, self.optimizer, step=number, **options)

    def numbers(self):
        """All numbers that the state holds."""
        found = {float(n) for p in self.model.parameters() for n in p.detach().unique()}
        for state in self.optimizer.states():
            for shard in state.tensors.values():
                found |= {float(n) for piece in shard.pieces for n in piece.tensor.unique()}
        return found


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def save_until_killed(plugin, folder, victim, moment, same_step, keep_last):
    """Save one checkpoint after another until a rank dies: at its `moment`-th call that changes the disk."""
    job = Job(plugin)
    job.save(folder, 1, keep_last=keep_last)
    if torch.distributed.get_rank() == victim:
        counting(moment, die)
    for number in range(2, 6):
        job.save(folder, 1 if same_step else number, keep_last=keep_last)
    return job.numbers()


def counting(moment, act):
    """Call `act` before the `moment`-th of the calls that change something on disk."""
    left = [moment]

    def counted(real):
        def call(*args, **kwargs):
            if left[0] == 0:
                act()
            left[0] -= 1
            return real(*args, **kwargs)

        return call

    for module, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (os, "mkdir"), (os, "rmdir"), (os, "unlink")):
        setattr(module, name, counted(getattr(module, name)))
    tensor_file._write_all = counted(tensor_file._write_all)


def killed_at_random(plugin, folder, victim, seconds, asynchronous):
    """As above, but at any time."""
    job = Job(plugin)
    job.save(folder, 1)
    job.booster.save(folder, job.model, job.optimizer, step=1, asynchronous=True)  # the thread's group is made
    job.booster.finish_saving()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == victim:
        threading.Timer(seconds, die).start()
    for number in range(2, 200):
        job.save(folder, number, keep_last=2, asynchronous=asynchronous)


def whole_state(folder):
    """All numbers of the checkpoint that a load would take, every byte of it checked; and the step it says."""
    found = open_checkpoint(folder, Axis.alone("world"), thorough=True)
    numbers = set()
    for key, stored in found.manifest.tensors.items():
        whole = torch.full(stored.shape, float("nan"))
        read_into(found, [(key, Shard(stored.shape, stored.dtype, [Piece((0,) * whole.dim(), whole)]))])
        numbers |= {float(n) for n in whole.unique()}
    assert len(found.manifest.of_part("optimizer")) == 24
    return numbers, found.manifest.step


def resumed(plugin, folder):
    """What a new job loads; and what lies in the folder after its first save."""
    job = Job(plugin)
    step = job.booster.load(folder, job.model, job.optimizer)
    numbers = job.numbers()
    job.save(folder, 7)
    return step, numbers


def check(plugin, folder, steps):
    numbers, step = whole_state(folder)
    assert step in steps and numbers == {float(step)}
    for loaded, of_rank in run_on_ranks(2, resumed, plugin, str(folder)):
        assert loaded == step and of_rank == {float(step)}
    assert whole_state(folder) == ({7.0}, 7)
    assert (Path(folder) / LATEST).read_text().strip() == "step-00000007"
    hidden = [p.name for p in Path(folder).iterdir() if p.name.startswith(".")]
    assert hidden == []  # nothing is left of the save that died


@pytest.mark.sample("zero-1-*5-False", "ddp-0-13-True", "zero-0-2[02]-*")
@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("moment", range(28))
@pytest.mark.parametrize("plugin, victim", [("zero", 0), ("zero", 1), ("ddp", 0)])
def test_a_rank_is_killed_at_any_call_that_changes_the_disk(tmp_path, plugin, victim, moment, same_step):
    started = time.monotonic()
    try:
        answers = run_on_ranks(2, save_until_killed, plugin, str(tmp_path), victim, moment, same_step, 2)
        assert answers[0] == {5.0}  # there are not so many such calls
    except RankFailure as failure:
        assert "SIGKILL" in str(failure) or "died" in str(failure), failure
        assert time.monotonic() - started < 20
    check(plugin, tmp_path, {1} if same_step else range(1, 6)) if not same_step else check_same(plugin, tmp_path)


def check_same(plugin, folder):
    """The step was saved again and again, each time with another number."""
    numbers, step = whole_state(folder)
    assert step == 1 and len(numbers) == 1 and numbers <= {1.0, 2.0, 3.0, 4.0, 5.0}
    for loaded, of_rank in run_on_ranks(2, resumed, plugin, str(folder)):
        assert loaded == 1 and of_rank == numbers
    assert whole_state(folder) == ({7.0}, 7)
    assert [p.name for p in Path(folder).iterdir() if p.name.startswith(".")] in ([], [".step-00000001.finished"])


@pytest.mark.sample("0-False", "1-True")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("number", range(25))
def test_a_rank_is_killed_at_any_time(tmp_path, number, asynchronous):
    chance = random.Random(number)
    with pytest.raises(RankFailure):
        run_on_ranks(2, killed_at_random, "zero", str(tmp_path), number % 2, chance.uniform(0.0, 0.3), asynchronous)
    check("zero", tmp_path, range(1, 200))


def disk_is_full(plugin, folder):
    """The limit stands for a full disk: writing fails in the middle of a file."""
    job = Job(plugin)
    job.save(folder, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if torch.distributed.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    started = time.monotonic()
    try:
        with pytest.raises(CheckpointError, match=r"(?s)the training state was not saved.*rank 1.*File too large"):
            job.save(folder, 2)
        with pytest.raises(CheckpointError, match="File too large"):  # in the background it comes out later
            job.save(folder, 3, asynchronous=True)
            job.booster.finish_saving()
        assert time.monotonic() - started < 10
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    torch.distributed.barrier()  # the writer has tidied up
    names = sorted(p.name for p in Path(folder).iterdir())
    job.fill(9)
    assert job.booster.load(folder, job.model, job.optimizer, verify=True) == 1 and job.numbers() == {1.0}
    job.save(folder, 4)
    return names


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_full_disk_is_an_error_on_all_ranks_and_costs_nothing(tmp_path, plugin):
    answers = run_on_ranks(2, disk_is_full, plugin, str(tmp_path))
    assert answers == [["latest", "step-00000001"]] * 2
    assert whole_state(tmp_path) == ({4.0}, 4)


def unwritable(folder):
    job = Job("zero")
    with pytest.raises(CheckpointError, match=r"(?s)not saved to .*rank 0"):
        job.save(folder, 1)
    with pytest.raises(CheckpointError, match=r"(?s)not saved to .*rank 0"):
        job.save(folder, 1, asynchronous=True)
        job.booster.finish_saving()


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "sub", tmp_path / "file", Path("/proc/none")):
        run_on_ranks(2, unwritable, str(folder))
    assert (tmp_path / "file").read_text() == ""


def test_what_is_found(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        find_checkpoint(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"booster\.load_model"):
        find_checkpoint(tmp_path)
    assert steps_in(tmp_path) == {}
    assert staged_folder.has_entries(tmp_path)
