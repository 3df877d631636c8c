"""On one device every optimizer is what its paper says: torch's, a well-kept package's, or the formulas in float64."""

import copy
import math

import pytest
import pytorch_optimizer
import torch
from torch import nn

from colonnade.errors import ConfigError, UsageError
from colonnade.optim import CAME, Adafactor, GaLoreAdamW, Lamb, Lars, Muon
from tests.optim.optim_cases import OPTIMIZERS, STEPS, parameters, relative, train

TOLERANCE = 1e-5
SHAPES = [(16, 24), (24, 16), (9, 5), (12,)]


def same(make, make_oracle, shapes=SHAPES, dtype=torch.float32, skip=False):
    """Largest relative difference of two optimizers after some steps; with `skip` a parameter has no gradient at times."""
    generator = torch.Generator().manual_seed(2)
    ours = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone().to(dtype)) for p in ours]
    optimizer, oracle = make(ours), make_oracle(theirs)
    for step in range(STEPS):
        for i, (own, other) in enumerate(zip(ours, theirs)):
            grad = torch.randn(own.shape, generator=generator) * 0.3 + 0.1
            skipped = skip and i == 1 and step % 3 == 1
            own.grad, other.grad = (None, None) if skipped else (grad, grad.to(dtype))
        optimizer.step()
        oracle.step()
    return max(relative(own, other) for own, other in zip(ours, theirs))


def with_aux(params, options, aux):
    return [
        {"params": [p for p in params if p.dim() == 2]} | options,
        {"params": [p for p in params if p.dim() != 2]} | aux,
    ]


class Pair:
    """Two optimizers stepped as one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "lr": 0.05, "eps": (1e-8, 1e-2), "d": 1.5}])
def test_adafactor_is_that_of_torch(options):
    shapes = [*SHAPES, (3, 6, 8)]
    assert (
        same(lambda p: Adafactor(p, **options), lambda p: torch.optim.Adafactor(p, **options), shapes, skip=True)
        < TOLERANCE
    )


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "ns_steps": 3}, {"adjust_lr_fn": "match_rms_adamw"}])
def test_muon_is_that_of_torch_with_its_adamw_beside_it(options):
    def oracle(params):
        return Pair(
            torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-2, **options),
            torch.optim.AdamW([p for p in params if p.dim() != 2], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
        )

    def ours(params):
        groups = with_aux(params, {}, {"use_muon": False, "lr": 3e-3})
        return Muon(groups, lr=1e-2, ns_dtype=torch.bfloat16, **options)

    assert same(ours, oracle, skip=True) < TOLERANCE


def test_muon_in_float32_is_muon_in_float64():
    assert same(*[lambda p: Muon(p, lr=1e-2)] * 2, SHAPES[:3], torch.float64) < TOLERANCE


class PlainLamb(pytorch_optimizer.Lamb):
    clamp = math.inf  # that package limits the norm of a weight to 10 in any case


def test_lamb_is_that_of_a_package():
    """Which corrects the bias of the first moment after the norms have been taken, unless told not to."""
    package = {"weight_decouple": False, "adam_debias": True}
    options = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}
    assert (
        same(
            lambda p: Lamb(p, bias_correction=False, **options),
            lambda p: PlainLamb(p, **package, **options),
        )
        < TOLERANCE
    )
    assert (
        same(
            lambda p: Lamb(p, bias_correction=False, norm_range=(0.0, 10.0), **options),
            lambda p: pytorch_optimizer.Lamb(p, **package, **options),
        )
        < TOLERANCE
    )


def test_lars_is_that_of_a_package():
    """Which leaves vectors alone: plain momentum SGD without decay."""
    options = {"lr": 0.5, "momentum": 0.9, "trust_coefficient": 0.02}

    def ours(params):
        return Lars(with_aux(params, {"weight_decay": 0.1}, {"weight_decay": 0.0, "adapt": False}), **options)

    assert same(ours, lambda p: pytorch_optimizer.LARS(p, weight_decay=0.1, **options)) < TOLERANCE


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "clip_threshold": 0.5, "betas": (0.8, 0.99, 0.999)}])
def test_came_is_that_of_a_package(options):
    """Which decays weights before the update, as we do."""
    assert (
        same(lambda p: CAME(p, lr=1e-2, **options), lambda p: pytorch_optimizer.CAME(p, lr=1e-2, **options)) < TOLERANCE
    )


@pytest.mark.parametrize("gap, beta1", [(1, 0.0), (1000, 0.9)])
@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "left", "right", "full"])
def test_galore_is_that_of_a_package(proj_type, gap, beta1):
    """Which leaves the signs of a new projection to chance, so that momentum may not go on over it; counts steps from 1 when
    it renews the projection; and adds eps before the bias is corrected: it is small here. What is projected from both sides
    has entries that are zero but for rounding, of which Adam with a small eps makes whole steps: there eps is large, and
    with β₂ = 0 there is no bias to correct.
    """
    eps, beta2 = (1e-3, 0.0) if proj_type == "full" else (1e-12, 0.999)
    options = {"lr": 1e-2, "eps": eps, "betas": (beta1, beta2)}
    projection = {"rank": 4, "update_proj_gap": gap, "scale": 0.5}

    def ours(params):
        return GaLoreAdamW(with_aux(params, projection | {"proj_type": proj_type}, {}), **options)

    def theirs(params):
        return pytorch_optimizer.GaLore(with_aux(params, projection | {"projection_type": proj_type}, {}), **options)

    assert same(ours, theirs) < TOLERANCE


def test_groups_without_rank_are_adamw_of_torch():
    options = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.99)}
    assert same(lambda p: GaLoreAdamW(p, **options), lambda p: torch.optim.AdamW(p, **options), skip=True) < TOLERANCE


class InFloat64:
    """The formulas of a paper, applied to each parameter by itself."""

    def __init__(self, params, rule):
        self.params, self.rule, self.states = params, rule, [{"t": 0} for _ in params]

    @torch.no_grad()
    def step(self):
        for param, state in zip(self.params, self.states):
            if param.grad is not None:
                state["t"] += 1
                param.copy_(self.rule(param, param.grad, state))


def adam_of(state, g, eps, beta1=0.9, beta2=0.999):
    m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g * g
    return m / (1 - beta1 ** state["t"]) / ((v / (1 - beta2 ** state["t"])).sqrt() + eps)


def test_lamb_is_algorithm_2_of_the_paper():
    def rule(w, g, state):
        r = adam_of(state, g, 1e-6) + 0.1 * w
        return w - 1e-2 * w.norm().clamp(0.5, 3.0) / r.norm() * r

    options = {"lr": 1e-2, "weight_decay": 0.1, "norm_range": (0.5, 3.0)}
    found = same(lambda p: Lamb(p, **options), lambda p: InFloat64(p, rule), SHAPES, torch.float64, skip=True)
    assert found < TOLERANCE


def test_lars_is_algorithm_1_of_the_paper_also_when_the_rate_changes():
    def rate(step):
        return 0.5 / step

    def rule(w, g, state):
        local = 0.02 * w.norm() / (g.norm() + 0.1 * w.norm())
        state["v"] = 0.9 * state.get("v", 0) + rate(state["t"]) * local * (g + 0.1 * w)
        return w - state["v"]

    class Scheduled(Lars):
        calls = 0

        def step(self):
            self.calls += 1
            self.param_groups[0]["lr"] = rate(self.calls)
            return super().step()

    options = {"weight_decay": 0.1, "trust_coefficient": 0.02}
    found = same(lambda p: Scheduled(p, **options), lambda p: InFloat64(p, rule), SHAPES, torch.float64)
    assert found < TOLERANCE


def test_galore_is_algorithm_2_of_the_paper_with_a_projection_renewed_every_seven_steps():
    def rule(w, g, state):
        left = w.shape[0] < w.shape[1]
        if (state["t"] - 1) % 7 == 0:
            u, _, v = torch.linalg.svd(g, full_matrices=False)
            p = u[:, :4] if left else v[:4].T
            state["p"] = p * torch.stack([column[column.abs().argmax()].sign() for column in p.T])
        p = state["p"]
        update = p @ adam_of(state, p.T @ g, 1e-8) if left else adam_of(state, g @ p, 1e-8) @ p.T
        return (1 - 1e-2 * 0.1) * w - 1e-2 * 0.5 * update

    def ours(params):
        return GaLoreAdamW([{"params": params, "rank": 4, "update_proj_gap": 7, "scale": 0.5}], 1e-2, weight_decay=0.1)

    assert same(ours, lambda p: InFloat64(p, rule), SHAPES[:3], torch.float64, skip=True) < TOLERANCE


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_cutting_the_parameters_into_batches_changes_nothing(name):
    found = []
    for elements in (1, 500, 1 << 26):
        params = parameters()
        optimizer = OPTIMIZERS[name](list(params.values()))
        optimizer.batch_elements = elements
        train(params, optimizer)
        found.append(params)
    assert all(torch.equal(found[0][key], other[key]) for other in found for key in found[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_in_float32_survives_saving_beside_16_bit_parameters(name):
    params = [nn.Parameter(torch.randn(6, 8).bfloat16()), nn.Parameter(torch.randn(8).bfloat16())]
    optimizer = OPTIMIZERS[name](params)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    again = OPTIMIZERS[name](copy.deepcopy(params))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param, other in zip(params, again.param_groups[0]["params"] + again.param_groups[-1]["params"][-1:]):
        assert param.dtype == torch.bfloat16
        for key, value in optimizer.state[param].items():
            assert value.dtype == again.state[other][key].dtype == torch.float32
            assert torch.equal(value, again.state[other][key])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_with_a_closure_and_leaves_the_gradient_alone(name):
    weight = nn.Parameter(torch.randn(6, 8))
    optimizer = OPTIMIZERS[name]([weight])

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    before = weight.detach().clone()
    assert optimizer.step(closure).item() == pytest.approx(before.square().sum().item())
    assert torch.equal(weight.grad, 2 * before)
    assert optimizer.step(closure) < before.square().sum()


def test_parameters_of_norm_zero_are_moved():
    for make in (Lamb, Lars):
        weight = nn.Parameter(torch.zeros(3, 3))
        weight.grad = torch.ones(3, 3)
        make([weight]).step()
        assert torch.isfinite(weight).all() and (weight != 0).all()


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda p: Muon(p), r"given parameters of the shapes \(12,\), \(\)"),
        (lambda p: GaLoreAdamW([{"params": p, "rank": 4}]), r"shapes \(12,\), \(\) in a group with a rank"),
        (lambda p: GaLoreAdamW([{"params": p, "rank": 0, "proj_type": "up"}]), "rank=0, proj_type='up'"),
        (lambda p: Adafactor(p, lr=-1.0, d=0.5), "lr=-1.0, d=0.5"),
        (lambda p: CAME(p, betas=(0.9, 0.99)), "betas"),
        (lambda p: Lamb(p, norm_range=(2.0, 1.0)), "norm_range"),
        (lambda p: Lars(p, trust_coefficient=0.0), "trust_coefficient"),
    ],
)
def test_wrong_options_are_named(make, text):
    params = [nn.Parameter(torch.zeros(shape)) for shape in [(3, 4), (12,), (12,), ()]]
    with pytest.raises(ConfigError, match=text):
        make(params)


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UsageError, match="sparse gradients"):
        Lamb(embedding.parameters()).step()
