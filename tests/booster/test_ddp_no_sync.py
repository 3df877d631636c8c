"""Gradients that were only accumulated, under TorchDDPPlugin: the step averages them, as it does under ZeRO-1."""

import pytest
import torch
from parity_runs import build, rows
from torch import nn

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import TorchDDPPlugin
from colonnade.testing.parity import rows_of
from colonnade.testing.ranks import run_on_ranks

OPTIONS = [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.01}]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def boost(model, precision="fp32", **options):
    booster = Booster(plugin=TorchDDPPlugin(precision=precision, **options))
    return booster, *booster.boost(model, sgd(model))[:2]


def of_one_process(steps):
    model = build("LL")
    optimizer = sgd(model)
    for step in steps:
        for batch in step:
            (model(**batch).loss / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def trained(ways, options):
    """Steps of two backward passes; for each step, whether `no_sync` is around ("forward" only) and what follows."""
    booster, model, optimizer = boost(build("LL"), **options)
    rank, ranks = booster.plugin.mesh.rank("dp"), booster.plugin.mesh.size("dp")
    steps = [rows(6)[:2] for _ in ways]
    for way, step in zip(ways, steps):
        for batch in step:
            mine = rows_of(batch, rank, ranks)
            if way == "all":
                with booster.no_sync(model, optimizer):
                    booster.backward(model(**mine).loss / 2, optimizer)
            elif way == "plain backward":
                with booster.no_sync(model, optimizer):
                    (model(**mine).loss / 2).backward()
            elif way == "the optimizer's":
                with optimizer.no_sync():
                    booster.backward(model(**mine).loss / 2, optimizer)
            elif way == "forward":
                with booster.no_sync(model, optimizer):
                    loss = model(**mine).loss / 2
                booster.backward(loss, optimizer)
            else:
                booster.backward(model(**mine).loss / 2, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    wanted = of_one_process(steps)
    for name, param in model.unwrap().named_parameters():
        torch.testing.assert_close(param, wanted[name], rtol=1e-5, atol=1e-6, msg=f"{name}, {ways}")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_right_after_no_sync_averages_what_is_left(options, ranks):
    run_on_ranks(ranks, trained, ["all", "plain backward", "", "forward", "the optimizer's", "all"], options)


class Branches(nn.Module):
    """Layers of which a forward uses some."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})

    def forward(self, x, use):
        for name in use:
            x = self.layers[name](x)
        return x.square().mean()


def ranks_that_use_different_layers():
    booster, model, optimizer = boost(Branches(), find_unused_parameters=True)
    rank, x = booster.plugin.mesh.rank("dp"), torch.ones(2, 4)
    with booster.no_sync(model, optimizer):
        booster.backward(model(x, use=("a", "ab")[rank]), optimizer)
    optimizer.step()
    alone = Branches()
    ((alone(x, use="a") + alone(x, use="ab")) / 2).backward()
    unused = alone.layers["c"].weight
    assert unused.grad is None and model.unwrap().layers["c"].weight.grad is None
    for param, wanted in zip(model.unwrap().parameters(), alone.parameters()):
        if wanted.grad is not None:
            torch.testing.assert_close(param.grad, wanted.grad)


def test_ranks_that_use_different_layers():
    run_on_ranks(2, ranks_that_use_different_layers)


class Looked(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.table = nn.Embedding(8, 4, sparse=True)

    def forward(self, rows):
        return self.table(rows).square().mean()


def sparse_gradients():
    booster, model, optimizer = boost(Looked())
    rank, rows_of_rank = booster.plugin.mesh.rank("dp"), torch.tensor([[1, 2], [2, 5]])
    alone = Looked()
    stepper = sgd(alone)
    for inside in (True, False, True):
        with booster.no_sync(model, optimizer) if inside else torch.enable_grad():
            booster.backward(model(rows_of_rank[rank]), optimizer)
        alone(rows_of_rank.flatten()).backward()
        for each in (optimizer, stepper):
            each.step()
            each.zero_grad()
    torch.testing.assert_close(model.unwrap().table.weight, alone.table.weight)


def test_sparse_gradients():
    run_on_ranks(2, sparse_gradients)


def what_travels():
    booster, model, optimizer = boost(build("LL"))
    batch, numel = rows(6)[0], sum(p.numel() for p in model.parameters())
    for inside, dropped, wanted in ((True, False, numel), (True, True, 0), (False, False, 0)):
        with booster.no_sync(model, optimizer) if inside else torch.enable_grad():
            booster.backward(model(**batch).loss, optimizer)
        if dropped:
            optimizer.zero_grad()
        with colonnade.ledger() as ledger:
            optimizer.step()
        assert ledger.elements["all_reduce", "dp"] == wanted, (inside, dropped)
        optimizer.zero_grad()


def test_a_step_sends_gradients_only_where_some_are_left():
    run_on_ranks(2, what_travels)


def overflow_on_one_rank():
    booster, model, optimizer = boost(build("LL"), precision="fp16")
    before = model.lm_head.weight.clone()
    with booster.no_sync(model, optimizer):
        loss = model(**rows(6)[0]).loss
        booster.backward(loss * (float("inf") if booster.plugin.mesh.rank("dp") else 1.0), optimizer)
    optimizer.step()
    assert optimizer.loss_scaler.skipped == 1 and torch.equal(model.lm_head.weight, before)


def test_all_ranks_leave_a_step_out_where_one_has_overflowed():
    run_on_ranks(2, overflow_on_one_rank)
