"""OPT-1: a parameter that is not always used steps when it is used. And a parameter that a single rank uses."""

import pytest
import torch
from field_cases import DATA_PARALLEL, GRADIENT, Boosted, assert_close, assert_equal_bits, make_plugin, sgd
from torch import nn
from torch.optim import AdamW

from colonnade.shardformer import Policy
from colonnade.testing.ranks import run_on_ranks

USES_B = (True, False, False, True)
IN_PARTS = {"cpu_offload": True, "bucket_bytes": 100}  # less than half of a matrix here
MORE = {  # name: (plugin, what is added to its options)
    "ddp": ("ddp", {"find_unused_parameters": True}),
    "zero 1, offloaded": ("zero 1", {"cpu_offload": True}),
    "zero 1, offloaded in parts": ("zero 1", IN_PARTS),
    "zero 2, offloaded": ("zero 2", {"cpu_offload": True}),
    "zero 2, offloaded in parts": ("zero 2", IN_PARTS),
    "fsdp, offloaded": ("fsdp", {"cpu_offload": True}),
}
PLUGINS = list(dict.fromkeys([*DATA_PARALLEL, *MORE, "dp with an empty policy"]))


class TwoLinears(nn.Module):
    """a(x), plus b(x) where asked for; an ordinary module that belongs to no family."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, use_b):
        return self.a(x) + self.b(x) if use_b else self.a(x)


class NothingToSplit(Policy):
    def module_policy(self):
        return {}


def plugin_for(name, **options):
    if name == "dp with an empty policy":
        return make_plugin("dp", custom_policy=NothingToSplit(), **options)
    plugin, more = MORE.get(name, (name, {}))
    return make_plugin(plugin, **more | options)


def inputs(rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 + rank))


def adamw(model):
    return AdamW(model.parameters(), lr=0.1, weight_decay=0.0)


def steps_of(optimizer, model):
    return {name: float(optimizer.state[p].get("step", 0)) for name, p in model.named_parameters()}


def four_steps_on_ranks(name):
    run = Boosted(plugin_for(name), TwoLinears(), adamw)
    after = []
    for use_b in USES_B:
        run.optimizer.zero_grad()
        loss = run.model(inputs(run.plugin.mesh.rank("dp")), use_b).square().mean()
        run.booster.backward(loss, run.optimizer)
        run.optimizer.step()
        after.append(run.weights())
    return after, run.steps()


def four_steps_in_one_process():
    model = TwoLinears()
    optimizer, after = adamw(model), []
    for use_b in USES_B:
        optimizer.zero_grad()
        model(torch.cat([inputs(0), inputs(1)]), use_b).square().mean().backward()
        optimizer.step()
        after.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return after, steps_of(optimizer, model)


@pytest.mark.parametrize("name", PLUGINS)
def test_an_unused_parameter_is_passed_over(name):
    wanted, wanted_steps = four_steps_in_one_process()
    assert wanted_steps == {"a.weight": 4, "a.bias": 4, "b.weight": 2, "b.bias": 2}
    for after, steps in run_on_ranks(2, four_steps_on_ranks, name):
        assert steps == wanted_steps
        for weights, in_one in zip(after, wanted):
            assert_close(weights, in_one, 1e-6)
        b = [{n: weights[n] for n in ("b.weight", "b.bias")} for weights in after]
        assert_equal_bits(b[1], b[0])
        assert_equal_bits(b[2], b[0])


def used_by_one_rank(name, user_rank):
    """Gradients and norm where b is used by one rank only, then the steps that Adam counts over four such steps."""
    run = Boosted(plugin_for(name), TwoLinears(), sgd)
    rank = run.plugin.mesh.rank("dp")
    run.booster.backward(run.model(inputs(rank), rank == user_rank).square().mean(), run.optimizer)
    gradients = run.gradients_by_step()
    counting = Boosted(plugin_for(name), TwoLinears(), adamw)
    for step in range(4):
        counting.optimizer.zero_grad()
        loss = counting.model(inputs(rank), step == 2 and rank == user_rank).square().mean()
        counting.booster.backward(loss, counting.optimizer)
        counting.optimizer.step()
    counting.weights()  # compares the replicas
    return gradients, run.optimizer.grad_norm, counting.steps()


@pytest.mark.sample("*-1")
@pytest.mark.parametrize("user_rank", [0, 1])
@pytest.mark.parametrize("name", PLUGINS)
def test_a_parameter_that_one_rank_uses_gets_the_mean_gradient(name, user_rank):
    model = TwoLinears()
    (sum(model(inputs(rank), rank == user_rank).square().mean() for rank in (0, 1)) / 2).backward()
    wanted = {n: p.grad for n, p in model.named_parameters()}
    norm = torch.cat([g.flatten() for g in wanted.values()]).norm().item()
    for gradients, reported, steps in run_on_ranks(2, used_by_one_rank, name, user_rank):
        assert_close(gradients, wanted, GRADIENT)
        assert reported == pytest.approx(norm, rel=1e-5)
        assert steps == {"a.weight": 4, "a.bias": 4, "b.weight": 1, "b.bias": 1}
