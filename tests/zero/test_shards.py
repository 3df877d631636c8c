"""FlatShards: any optimizer steps on them as on the parameters, and nothing that is done to the model from outside is lost."""

import pytest
import torch
from side_by_side import LAYERS, SMALL, STAGES, SideBySide, adamw, each, momentum
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from colonnade.booster import Booster
from colonnade.booster.plugin import LowLevelZeroPlugin
from colonnade.errors import UsageError
from colonnade.precision.state import SavedState, Shape
from colonnade.testing.ranks import on_ranks, run_on_ranks

CASES = [stage | more for stage in STAGES for more in ({}, SMALL, {"cpu_offload": True})]


class Lion(Optimizer):
    """(Symbolic discovery of optimization algorithms, Chen et al. 2023.) Elementwise, and no optimizer of torch's own."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    # a smooth sign: a step is then no question of rounding
                    param.sub_(torch.tanh(30 * (0.9 * mean + 0.1 * param.grad)), alpha=group["lr"])
                    mean.lerp_(param.grad, 0.01)


class ByNorm(Optimizer):
    """Scales each gradient by its own norm, and has to be given whole parameters."""

    elementwise = False

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / (param.grad.norm() + 1e-3), alpha=group["lr"])


OPTIMIZERS = {
    "AdamW": adamw,
    "AdamW with amsgrad": lambda model: AdamW(model.parameters(), lr=1e-2, eps=1e-3, amsgrad=True),
    "AdamW, one by one": lambda model: AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False),
    "SGD with momentum": momentum,
    "SGD": lambda model: SGD(model.parameters(), lr=0.1),
    "Adagrad": lambda model: Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1),
    "RMSprop": lambda model: RMSprop(model.parameters(), lr=1e-2, momentum=0.9, eps=1e-3),
    "NAdam": lambda model: NAdam(model.parameters(), lr=1e-2, eps=1e-3),
    "Lion": lambda model: Lion(model.parameters()),
    "Adafactor": lambda model: Adafactor(model.parameters(), lr=1e-2),
    "Muon": lambda model: Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2),
    "ByNorm": lambda model: ByNorm(model.parameters()),
}


def two_steps(model, optimizer):
    """Before boost, with other layers in each of them."""
    for seed, use in enumerate(("abc", "ab")):
        optimizer.zero_grad()
        model(torch.randn(4, 9, generator=torch.Generator().manual_seed(seed)), use).backward()
        optimizer.step()
    optimizer.zero_grad()


def with_optimizer(name, before, **options):
    run = SideBySide(OPTIMIZERS[name], before, **options)
    run.train(LAYERS, LAYERS, LAYERS, "ab", LAYERS)
    if name in ("Muon", "Adafactor", "ByNorm"):
        assert all(len(unit.pieces) == 1 for unit in run.units())
        assert all(unit.tensor.shape == unit.pieces[0].param.shape for unit in run.units())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "SGD with momentum"])
def test_any_optimizer_steps_as_in_one_process(name, ranks):
    run_on_ranks(ranks, each, CASES, with_optimizer, name, None)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_states_of_an_optimizer_that_has_stepped_are_taken_over(name):
    run_on_ranks(2, each, CASES, with_optimizer, name, two_steps)


def written(**options):
    run = SideBySide(**options)
    run.train(LAYERS)
    for model, _ in run.both:
        with torch.no_grad():
            model.a.weight.mul_(1.5)
            model.b.bias[3] = 7.0
    run.train(LAYERS, "bc", first_seed=1)
    for model, _ in run.both:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9
    run.train("acd", LAYERS, first_seed=3)
    for model, _ in run.both:
        model.to(torch.float64).to(torch.float32)
    run.train(LAYERS, first_seed=5)
    run.backward(6)
    for model, _ in run.both:  # between backward and step
        with torch.no_grad():
            model.d.weight.add_(0.1)
            model.c.weight.data = model.c.weight.data.clone()
    run.step()
    run.assert_same()


def test_what_else_writes_into_the_model_is_seen():
    run_on_ranks(2, each, CASES, written)


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(40))

    def forward(self):
        return self.w.float().sum()


def written_in_bf16(**options):
    """Steps of 2⁻¹⁰ at 1, where bfloat16 has steps of 2⁻⁸: the master weights add them up, beside what is written."""
    plugin = LowLevelZeroPlugin(precision="bf16", **options)
    booster, plain = Booster(plugin=plugin), Weights()
    model, optimizer, *_ = booster.boost(plain, SGD(plain.parameters(), lr=2**-10))

    def steps(number):
        for _ in range(number):
            booster.backward(model(), optimizer)
            optimizer.step()
            optimizer.zero_grad()

    steps(2)
    with torch.no_grad():
        plain.w[0] = 3.0
        plain.w[39] = -2.0
    steps(1)
    plain.to(torch.float32)
    steps(1)
    assert plain.w.dtype is torch.bfloat16
    assert plain.w[0] == 3.0
    assert plain.w[39] == -2.0
    assert (plain.w[1:39] == 1 - 2**-8).all()
    plain.w.data = torch.full((40,), 5.0)
    optimizer.stepped.refresh()
    steps(1)
    assert (plain.w == 5).all()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_written_entries_and_only_those_replace_master_weights(ranks):
    run_on_ranks(ranks, each, CASES, written_in_bf16)


def one_backward(model, optimizer):
    model(torch.randn(4, 9, generator=torch.Generator().manual_seed(0))).backward()


def gradients_before_boost(**options):
    run = SideBySide(before_boost=one_backward, **options)
    run.backward(1, "ab")
    run.step()
    run.assert_same()
    run.train(LAYERS, first_seed=2)
    run = SideBySide(before_boost=one_backward, **options)
    run.step()
    run.assert_same()
    run.train("abc")
    run = SideBySide(before_boost=one_backward, **options)
    run.zero_grad()
    run.train("abc")


def test_gradients_that_are_there_at_boost_count():
    run_on_ranks(2, each, CASES, gradients_before_boost)


def boosted_again(**options):
    run = SideBySide(**options)
    run.train(LAYERS)
    for again in ((run.model, run.optimizer), (run.plain, run.optimizer), (run.model, run.optimizer.inner)):
        with pytest.raises(UsageError, match="has been boosted already"):
            run.booster.boost(*again)
    with pytest.raises(UsageError, match="boosted with ZeRO before"):
        run.booster.boost(run.plain, run.optimizer.inner)
    earlier = run.optimizer
    run.one_optimizer = momentum(run.one)
    run.model, run.optimizer, *_ = run.booster.boost(run.plain, momentum(run.plain))
    run.train(LAYERS, "abc", first_seed=1)
    assert all(bucket.gradient is None for bucket in earlier.reducer.buckets), "the earlier one takes no part"


def test_a_model_may_be_boosted_again_with_a_new_optimizer():
    run_on_ranks(2, each, CASES, boosted_again)


def groups(model):
    """All but a's weight, in groups with their own rates, one of them empty."""
    return AdamW(
        [
            {"params": [model.d.bias, model.b.weight, model.b.bias], "lr": 1e-2},
            {"params": [], "lr": 1.0},
            {"params": [model.c.weight, model.scale, model.d.weight, model.c.bias], "lr": 3e-2, "weight_decay": 0.3},
        ],
        eps=1e-3,
    )


def several_groups(**options):
    run = SideBySide(groups, **options)
    schedulers = [LambdaLR(run.one_optimizer, [lambda t: 0.5**t, lambda t: 1.0, lambda t: 0.9**t])]
    inner = LambdaLR(run.optimizer, [lambda t: 0.5**t, lambda t: 1.0, lambda t: 0.9**t])
    kept = run.plain.a.weight.detach().clone()
    for seed in range(3):
        run.train(LAYERS, first_seed=seed)
        for scheduler in (*schedulers, inner):
            scheduler.step()
    assert [group["lr"] for group in run.optimizer.param_groups] == [1e-2 / 8, 1.0, 3e-2 * 0.9**3]
    assert torch.equal(run.plain.a.weight, kept)
    run.plain.a.weight.grad = None
    run.optimizer.add_param_group({"params": [run.plain.a.weight], "lr": 1e-2})
    run.backward(7, "b")
    run.step()  # it has no gradient yet
    run.assert_same()
    run.backward(8)
    with pytest.raises(UsageError, match="not averaged over data-parallel ranks"):
        run.optimizer.step()


def test_groups_schedules_parameters_left_out_and_a_group_that_comes_too_late():
    run_on_ranks(2, each, CASES, several_groups)


class Unusual(nn.Module):
    """A parameter without elements, a sparse gradient, one that is transposed in memory, one that appears twice."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.table = nn.Embedding(10, 9, sparse=True)
            self.turned = nn.Parameter(torch.randn(9, 4).t())
            self.empty = nn.Parameter(torch.zeros(0, 9))
            self.first = nn.Linear(9, 9)
            self.again = nn.Linear(9, 9)
        self.again.weight = self.first.weight

    def forward(self, x, use):
        x = self.again(torch.tanh(self.first(x))) + self.table(x[:, 0].abs().long()) + self.empty.sum()
        return (x @ self.turned.t()).square().mean()


def unusual(**options):
    run = SideBySide(lambda model: SGD(model.parameters(), lr=0.05), model_fn=Unusual, **options)
    run.train("", "", "")
    run.loss().backward(create_graph=True)
    run.optimizer.zero_grad()
    run.train("", first_seed=5)


def test_unusual_parameters_and_gradients():
    run_on_ranks(3, each, CASES, unusual)


@on_ranks(2)
def test_an_optimizer_without_anything_to_train():
    for stage in (1, 2):
        plain = Weights().requires_grad_(False)
        booster = Booster(plugin=LowLevelZeroPlugin(stage, precision="fp32"))
        model, optimizer, *_ = booster.boost(plain, SGD(plain.parameters(), lr=1.0))
        model()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.grad_norm == 0
        assert (plain.w == 1).all()


def zeroed_through_the_model(**options):
    run = SideBySide(**options)
    run.backward(0)
    run.model.zero_grad()
    run.one.zero_grad()
    run.train(LAYERS, first_seed=1)


def test_zero_grad_of_the_model_drops_gradients_as_well():
    run_on_ranks(2, each, CASES, zeroed_through_the_model)


def units_after_restore():
    model = nn.Sequential(*[nn.Linear(4 + i, 5 + i) for i in range(6)])
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32"))
    model, optimizer, *_ = booster.boost(model, AdamW(model.parameters()))
    odd = next(model.parameters())

    def count(number):
        def saved(param):
            tensors = {key: Shape(tuple(param.shape), torch.float32) for key in ("exp_avg", "exp_avg_sq")}
            return SavedState(tensors, {"step": torch.tensor(number if param is odd else 0.0099991)})

        optimizer.restore(saved)
        return len(optimizer.stepped._all_units())

    return len(optimizer.stepped._all_units()), count(0.0099991), count(0.0099992)


def test_a_restored_state_cuts_units_only_where_its_numbers_differ():
    """By shapes they always do; and torch prints the two numbers alike."""
    before, alike, unlike = run_on_ranks(1, units_after_restore)[0]
    assert before == alike == 1 and unlike == 2
