"""TorchFSDPPlugin: parameters without entries, with entries not in row order, and with sparse gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

from colonnade.booster import Booster
from colonnade.booster.plugin import TorchFSDPPlugin
from colonnade.errors import ConfigError
from colonnade.testing.parity import rows_of
from colonnade.testing.ranks import on_ranks, run_on_ranks


class Kinds(nn.Module):
    """
    Args:
        nothing: shapes of parameters without entries.
        strided: a convolution whose channels lie last, and a transposed matrix.
    """

    def __init__(self, nothing, strided):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv, self.table = nn.Conv2d(2, 3, 3, padding=1), nn.Parameter(torch.randn(12, 5))
        self.nothing = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in nothing)
        if strided:
            self.conv = self.conv.to(memory_format=torch.channels_last)
            self.table = nn.Parameter(self.table.detach().t().contiguous().t())

    def forward(self, x, target):
        out = self.conv(x).flatten(1) @ self.table + sum(p.sum() for p in self.nothing)
        return {"loss": F.mse_loss(out, target), "out": out}


def batches():
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(6, 2, 2, 2, generator=generator), "target": torch.ones(6, 5)} for _ in range(3)]


def train(nothing, strided):
    plugin = TorchFSDPPlugin(precision="fp32", max_norm=0.5)
    model = Kinds(nothing, strided)
    booster, optimizer = Booster(plugin=plugin), AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for batch in batches():
        booster.backward(model(**rows_of(batch, plugin.mesh.rank("dp"), plugin.mesh.size("dp")))["loss"], optimizer)
        optimizer.step()
        optimizer.zero_grad()
    named = model.unwrap().named_parameters()
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in named}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("nothing, strided", [([], True), ([(0,), (0, 5), (3, 0)], False), ([(0,)], True)])
def test_they_train_with_the_numbers_of_one_process(ranks, nothing, strided):
    model = Kinds(nothing, strided)
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for batch in batches():
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    for found in run_on_ranks(ranks, train, nothing, strided):
        assert found.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-6)


@on_ranks(2)
def test_sparse_gradients_are_refused_before_anything_is_changed():
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="(?s)Embedding 0 .*sparse=False"):
        Booster(plugin=TorchFSDPPlugin(precision="fp32")).boost(model, AdamW(model.parameters()))
    assert type(model) is nn.Sequential
    model[0].weight.requires_grad_(False)  # it then has no gradient
    Booster(plugin=TorchFSDPPlugin(precision="fp32")).boost(model)
