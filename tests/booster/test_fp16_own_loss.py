"""fp16 with models that compute their loss themselves, in fp16: its average over ranks must not overflow or lose digits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colonnade.precision.loss_scale import LossScale
from colonnade.testing.ranks import run_on_ranks

CLASSES, WIDTH, EPS = 8, 6, 2**-11
ENGINES = {
    "ddp": (TorchDDPPlugin, {}),
    "dp": (HybridParallelPlugin, {}),
    "zero 1": (LowLevelZeroPlugin, {"stage": 1}),
    "zero 2": (LowLevelZeroPlugin, {"stage": 2}),
    "fsdp": (TorchFSDPPlugin, {}),
}


class Tagger(nn.Module):
    """Cross entropy over the labels that count, handed out in the format of the model, as many models do, or in float32."""

    def __init__(self, in_float32=False):
        super().__init__()
        self.in_float32 = in_float32
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.net = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, CLASSES))

    def forward(self, x, labels):
        logits = self.net(x)
        loss = F.cross_entropy(logits.float(), labels)  # torch's own in fp16 adds up in fp16 on the CPU
        return {"loss": loss if self.in_float32 else loss.to(logits.dtype), "logits": logits}


def rows(number, without=0):
    """A global batch; the last `without` rows are no targets."""
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(CLASSES, (number,), generator=generator)
    labels[number - without :] = -100
    return {"x": torch.randn(number, WIDTH, generator=generator), "labels": labels}


class Both:
    """In fp16 over ranks, and in fp32 in one process."""

    def __init__(self, engine, scale, in_float32=False, **options):
        kind, own = ENGINES[engine]
        scale = LossScale(initial=scale, growth_interval=0)
        self.plugin = kind(precision="fp16", loss_scale=scale, **own, **options)
        self.booster, model, self.one = Booster(plugin=self.plugin), Tagger(in_float32), Tagger(in_float32)
        self.model, self.optimizer, *_ = self.booster.boost(model, SGD(model.parameters(), lr=0.1))

    def share(self, batch):
        rank, ranks = self.plugin.mesh.rank("dp"), self.plugin.mesh.size("dp")
        return {name: value.chunk(ranks)[rank] for name, value in batch.items()}

    def compare(self, batch, through):
        """Loss and gradient norm of one step."""
        self.optimizer.zero_grad()
        if through == "loop":
            loss = self.model(**self.share(batch))["loss"]
            self.booster.backward(loss, self.optimizer)
        else:
            out = self.booster.execute_pipeline(iter([self.share(batch)]), self.model, None, self.optimizer)
            loss = out["loss"]
        scale = self.optimizer.loss_scale
        self.optimizer.step()
        self.one.zero_grad()
        wanted = self.one(**batch)["loss"]
        wanted.backward()
        norm = torch.cat([p.grad.flatten() for p in self.one.parameters()]).norm().item()
        assert loss.item() == pytest.approx(wanted.item(), rel=4 * EPS)
        assert self.optimizer.grad_norm == pytest.approx(norm, rel=16 * EPS)
        assert self.optimizer.loss_scale == scale, "nothing overflows"


def many_targets(engine):
    """loss × targets is beyond the largest number of fp16, and 1 / targets below the smallest normal one."""
    for through in ("loop", "pipeline"):
        Both(engine, 256.0).compare(rows(80_000), through)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sum_over_many_targets_does_not_overflow(engine):
    run_on_ranks(2, many_targets, engine)


def rank_without_targets(engine):
    """What stands for the loss of no targets is a zero, at scales that are no numbers of fp16 too."""
    for through in ("loop", "pipeline"):
        Both(engine, 256.0).compare(rows(16, without=8), through)
        Both(engine, 2.0**16, in_float32=True).compare(rows(16, without=8), through)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_without_targets_makes_no_overflow(engine):
    run_on_ranks(2, rank_without_targets, engine)


def micro_batches(engine):
    """Losses of many micro-batches are added up in float32."""
    Both(engine, 256.0, num_microbatches=64).compare(rows(512, without=37), "pipeline")


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_of_many_micro_batches_add_up(engine):
    run_on_ranks(2, micro_batches, engine)
