"""Clipping under every engine is that of torch in one process: of the averaged gradient, by its norm or entry by entry."""

import math

import pytest
import torch
from engines import ENGINES, Run, batch, largest_difference, plain_weights, sgd, small, world
from torch import nn

from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colonnade.errors import ConfigError
from colonnade.precision.clipping import Clipping
from colonnade.testing.parity import well_conditioned_adamw
from colonnade.testing.ranks import on_ranks, run_on_ranks

STEPS = 3
CLOSE = 1e-5
OPTIMIZERS = {"sgd": sgd, "adamw": well_conditioned_adamw}
CLIPPINGS = {"norm": {"max_norm": 0.7}, "value": {"max_value": 0.02}, "loose norm": {"max_norm": 1e6}, "none": {}}


def micro_batches(step, accumulate):
    return [batch(100 * step + number) for number in range(accumulate)]


def in_one_process(optimizer_fn, clipping, accumulate):
    """Weights after some steps, norms before clipping, and the share of entries that clipping has changed."""
    model, norms, changed = small(), [], []
    optimizer = optimizer_fn(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in micro_batches(step, accumulate):
            (model(**micro).loss / accumulate).backward()
        before = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        norms.append(before.norm().item())
        if "max_norm" in clipping:
            nn.utils.clip_grad_norm_(model.parameters(), clipping["max_norm"])
        if "max_value" in clipping:
            nn.utils.clip_grad_value_(model.parameters(), clipping["max_value"])
        after = torch.cat([p.grad.flatten() for p in model.parameters()])
        changed.append(float((before.float() != after).float().mean()))
        optimizer.step()
    return plain_weights(model), norms, changed


def train(engine, optimizer_fn, clipping, accumulate):
    run = Run(engine, small(), optimizer_fn, precision="fp32", **clipping)
    assert run.optimizer.grad_norm is None, "before the first step"
    norms = []
    for step in range(STEPS):
        run.optimizer.zero_grad()
        for micro in micro_batches(step, accumulate):
            run.backward(micro, 1 / accumulate)
        run.optimizer.step()
        norms.append(run.optimizer.grad_norm)
    return run.weights(), norms


def compare(engine, kinds, accumulate):
    """On the ranks: every kind of clipping with every optimizer, against one process; the worst differences."""
    worst = {}
    for kind in kinds:
        for name, optimizer_fn in OPTIMIZERS.items():
            wanted, wanted_norms, changed = in_one_process(optimizer_fn, CLIPPINGS[kind], accumulate)
            if kind in ("norm", "value"):
                assert all(share > (0.9 if kind == "norm" else 0.05) for share in changed), "it clips"
            found, norms = train(engine, optimizer_fn, CLIPPINGS[kind], accumulate)
            difference = largest_difference(found, wanted)
            assert difference <= CLOSE, f"{kind}, {name}: weights differ by {difference:.2g}"
            off = max(abs(a - b) / b for a, b in zip(norms, wanted_norms))
            assert off <= CLOSE, f"{kind}, {name}: norms {norms} and not {wanted_norms}"
            worst[f"{kind}, {name}"] = (difference, off, norms)
    return worst


@pytest.mark.sample("*-1")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_weights_are_those_of_one_process(engine, accumulate):
    kinds = CLIPPINGS if accumulate == 1 else ["norm", "value"]
    results = run_on_ranks(world(engine), compare, engine, list(kinds), accumulate)
    assert all(result == results[0] for result in results), "every rank reports the same norms"
    print(
        engine,
        f"weights {max(w for w, _, _ in results[0].values()):.1e}",
        f"norms {max(n for _, n, _ in results[0].values()):.1e}",
    )


PLUGINS = [TorchDDPPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchFSDPPlugin]
WRONG = [-1.0, -1e-9, math.nan, None, "1", True, torch.tensor(1.0)]


@pytest.mark.parametrize("name", ["max_norm", "max_value"])
@pytest.mark.parametrize("value", WRONG)
def test_what_is_no_limit_is_refused(name, value):
    with pytest.raises(ConfigError, match=name) as caught:
        Clipping(**{name: value})
    assert "≥ 0" in str(caught.value)


def test_zero_and_infinity_are_limits():
    grads = [torch.tensor([3.0, -4.0])]
    param = nn.Parameter(torch.zeros(2))
    for options in ({}, {"max_norm": 0}, {"max_value": 0.0}, {"max_norm": math.inf}, {"max_value": math.inf}):
        param.grad = grads[0].clone()
        Clipping(**options).apply([param, nn.Parameter(torch.zeros(3))], torch.tensor(5.0))
        assert param.grad.equal(grads[0])


@on_ranks(2)
def test_every_plugin_refuses_both_and_negative_ones():
    for plugin in PLUGINS:
        with pytest.raises(ConfigError, match="max_norm=1.0 and max_value=0.5 are both given"):
            plugin(max_norm=1.0, max_value=0.5, precision="fp32")
        for name in ("max_norm", "max_value"):
            with pytest.raises(ConfigError, match=f"{name}=-1.0 must be a number"):
                plugin(**{name: -1.0}, precision="fp32")


def test_a_sign_is_kept_and_what_is_no_number_stays_one():
    param = nn.Parameter(torch.zeros(5))
    param.grad = torch.tensor([-3.0, 0.1, 3.0, -math.inf, math.nan])
    Clipping(max_value=0.5).apply([param], torch.tensor(1.0))
    assert param.grad[:4].tolist() == [-0.5, pytest.approx(0.1), 0.5, -0.5]
    assert param.grad[4].isnan()


def test_it_is_the_factor_of_torch():
    for norm_limit in (1e-3, 0.5, 4.999, 5.0, 5.1):
        ours, theirs = (nn.Parameter(torch.zeros(2)) for _ in range(2))
        ours.grad, theirs.grad = torch.tensor([3.0, -4.0]), torch.tensor([3.0, -4.0])
        Clipping(max_norm=norm_limit).apply([ours], torch.tensor(5.0, dtype=torch.float64))
        nn.utils.clip_grad_norm_([theirs], norm_limit)
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("entry", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_clipped_as_torch_does(entry):
    ours, theirs = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    ours.grad, theirs.grad = torch.tensor([3.0, entry, -4.0]), torch.tensor([3.0, entry, -4.0])
    Clipping(max_norm=0.5).apply([ours], ours.grad.norm().double())
    nn.utils.clip_grad_norm_([theirs], 0.5)
    assert torch.allclose(ours.grad, theirs.grad, rtol=0, atol=0, equal_nan=True)
