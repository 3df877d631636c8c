"""A plain backward pass that raised leaves nothing behind, under every engine that reduces gradients by hooks."""

import pytest
import torch
from torch import nn

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin
from colonnade.testing.ranks import run_on_ranks

WIDTH = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, fail=False):
        hidden = self.a(x)
        if fail:
            hidden.register_hook(broken)
        return self.b(hidden).square().mean()


def broken(grad):
    raise ArithmeticError("in the middle of the backward pass")


def trained(plugin, options, fails):
    booster, model = Booster(plugin=plugin(precision="fp32", **options)), Net()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    rank = booster.plugin.mesh.rank("dp")
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
    if fails:
        with pytest.raises(ArithmeticError):
            model(x, fail=True).backward()
        optimizer.zero_grad()
    for _ in range(2):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.unwrap().parameters()]


@pytest.mark.parametrize("plugin, options", [
    (HybridParallelPlugin, {}), (HybridParallelPlugin, {"bucket_bytes": 4}), (LowLevelZeroPlugin, {"stage": 1}),
    (LowLevelZeroPlugin, {"stage": 2}),
])  # fmt: skip
def test_the_next_steps_are_as_if_it_had_not_been(plugin, options):
    wanted = run_on_ranks(2, trained, plugin, options, False)
    found = run_on_ranks(2, trained, plugin, options, True)
    for rank in (0, 1):
        assert all(torch.equal(a, b) for a, b in zip(found[rank], wanted[rank]))
        assert not torch.equal(found[rank][0], next(Net().parameters())), "it has been trained"
