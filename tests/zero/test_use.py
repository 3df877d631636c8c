"""ZeRO where parameters are not used alike: unused ones, used twice, late, frozen, accumulated, and broken backwards."""

import pytest
import torch
from side_by_side import LAYERS, SMALL, STAGES, SideBySide, adamw, each, momentum
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, RMSprop
from torch.utils.checkpoint import checkpoint

import colonnade
from colonnade.errors import UsageError
from colonnade.testing.ranks import on_ranks, run_on_ranks

EVERY = [
    stage | more
    for stage in STAGES
    for more in ({}, SMALL, {"cpu_offload": True}, SMALL | {"cpu_offload": True}, {"overlap_communication": False})
]


def used_at_some_steps(**options):
    run = SideBySide(**options)
    run.train("abcd", "ab", "ab", "abcd")
    assert all(count == (2 if name[0] in "cd" else 4) for name, count in run.counts().items()), run.counts()
    run.train("cd", "cd", "ab", first_seed=4)


def used_late(optimizer_fn, **options):
    """First some, then others, then all: the one has states and the other none."""
    run = SideBySide(optimizer_fn, **options)
    run.train("ab", "abc", "d", "abcd")


def used_by_some_ranks(**options):
    run = SideBySide(**options)
    run.train(*[[use[rank % 2] for rank in range(run.ranks)] for use in (("ab", "cd"), ("abc", "ab"), ("a", "abcd"))])
    run.train([LAYERS if rank else "" for rank in range(run.ranks)], first_seed=3)


def adagrad(model):
    return Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)


def rmsprop(model):
    return RMSprop(model.parameters(), lr=1e-2, centered=True, eps=1e-3)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_unused_parameter_is_passed_over(ranks):
    run_on_ranks(ranks, each, EVERY, used_at_some_steps)


@pytest.mark.parametrize("optimizer_fn", [adamw, momentum, adagrad, rmsprop])
def test_parameters_that_are_used_for_the_first_time_later(optimizer_fn):
    run_on_ranks(2, each, EVERY, used_late, optimizer_fn)


@pytest.mark.parametrize("ranks", [2, 3])
def test_parameters_that_only_some_ranks_use(ranks):
    run_on_ranks(ranks, each, EVERY, used_by_some_ranks)


def zeros_are_kept(optimizer_fn, **options):
    """zero_grad(set_to_none=False) leaves zeros, on which momentum and decay go on, also where a step has no backward."""
    run = SideBySide(optimizer_fn, **options)
    for seed, use in enumerate(("ab", "abc", "a", "", "cd", "ab")):
        if use:
            run.backward(seed, use)
        for _, optimizer in run.both:
            optimizer.step()
            optimizer.zero_grad(set_to_none=seed == 4)
        run.assert_same()


@pytest.mark.parametrize("optimizer_fn", [adamw, momentum])
def test_a_gradient_that_was_set_to_zero_is_stepped_on(optimizer_fn):
    run_on_ranks(2, each, EVERY, zeros_are_kept, optimizer_fn)


class TwoLinears(nn.Module):
    """a(x), plus b(x) where asked for."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.a, self.b = nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x, use):
        return (self.a(x) + self.b(x) if "b" in use else self.a(x)).square().mean()


def plain_adamw(model):
    return AdamW(model.parameters(), lr=0.1, weight_decay=0.0)


def step_counts(**options):
    run = SideBySide(plain_adamw, model_fn=TwoLinears, **options)
    kept = []
    for seed, use in enumerate(("ab", "a", "a", "ab")):
        run.train(use, first_seed=seed)
        kept.append([p.detach().clone() for p in run.plain.b.parameters()])
    for before, after in zip(kept[0], kept[2]):
        assert torch.equal(before, after), "b is untouched while it is unused"
    for name, count in run.counts().items():
        assert count == {"a": 4, "b": 2}[name[0]]


def test_step_counts_are_those_of_each_parameter():
    run_on_ranks(2, each, EVERY, step_counts)


def twice(plainly, **options):
    """The second gradient of a comes when its bucket has left: reentrant recomputation runs a backward within the other."""
    run = SideBySide(**options)
    for model, _ in run.both:
        model.recomputed = "ab"
    for seed, use in enumerate(("dacbadb", "ab", "ddccbbaab")):
        for rank in range(run.ranks):
            (run.one(run.rows(seed, rank).requires_grad_(), use) / run.ranks).backward()
        loss = run.model(run.rows(seed, run.rank).requires_grad_(), use)
        loss.backward() if plainly else run.booster.backward(loss, run.optimizer)
        run.step()
        run.assert_same()


@pytest.mark.parametrize("plainly", [False, True])
def test_a_parameter_that_one_backward_visits_twice(plainly):
    run_on_ranks(2, each, EVERY, twice, plainly)


def without_the_booster(**options):
    run = SideBySide(**options)
    for seed in range(3):
        run.backward(seed, plainly=True)
        run.backward(seed + 10, plainly=seed == 1)
        run.step()
        run.assert_same()


def test_a_plain_backward_is_reduced_as_well():
    run_on_ranks(2, each, EVERY, without_the_booster)


class Failing(torch.autograd.Function):
    """Passes a tensor on, and raises in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in the middle of a backward")


def interrupted(plainly, **options):
    run = SideBySide(**options)
    run.train(LAYERS)
    hidden = run.plain.b.register_forward_hook(lambda module, args, out: Failing.apply(out))
    loss = run.loss(5)
    with pytest.raises(ArithmeticError):
        loss.backward() if plainly else run.booster.backward(loss, run.optimizer)
    hidden.remove()
    run.zero_grad()
    for seed in (6, 7):
        run.backward(seed, plainly=plainly)
        run.step()
        run.assert_same()


@pytest.mark.parametrize("plainly", [False, True])
def test_a_backward_that_raised_leaves_nothing_behind(plainly):
    run_on_ranks(2, each, EVERY, interrupted, plainly)


def accumulated(**options):
    run = SideBySide(max_norm=0.05, **options)
    for step in range(3):
        for micro in range(3):
            run.backward(10 * step + micro, use=("abcd", "ab", "abc")[micro])
        run.step()
        run.assert_same()
    run.backward(90)
    run.zero_grad()  # dropped
    run.backward(91, "ab")
    run.step()
    run.assert_same()


def test_backwards_add_up_until_they_are_dropped():
    run_on_ranks(2, each, EVERY, accumulated)


def paused(**options):
    run = SideBySide(max_norm=0.05, **options)
    for step, uses in enumerate((("ab", "cd", "abcd"), ("abcd", "b", "a"), ("ab", "ab", "ab"))):
        with run.booster.no_sync(run.model, run.optimizer), colonnade.ledger() as book:
            run.backward(10 * step, uses[0])
            run.backward(10 * step + 1, uses[1])
        assert not book.calls
        run.backward(10 * step + 2, uses[2])
        run.step()
        run.assert_same()
    with run.booster.no_sync(run.model, run.optimizer):
        run.backward(40, "abc")
        run.backward(41, "bcd")
    run.step()  # everything accumulated is reduced by the step
    run.assert_same()
    run.backward(50)
    with run.booster.no_sync(run.model, run.optimizer):
        run.backward(51, "ab")  # on top of what has been reduced already
    run.step()
    run.assert_same()
    with run.booster.no_sync(run.model, run.optimizer):
        run.backward(60, "abc")
        run.zero_grad()
        run.backward(61, "bc")
    run.step()
    run.assert_same()


def test_stage_1_accumulates_without_communication():
    run_on_ranks(2, each, [case for case in EVERY if case["stage"] == 1], paused)


def steps_without_a_backward(**options):
    run = SideBySide(**options)
    run.step()
    run.train(LAYERS, "ab")
    kept = [p.detach().clone() for p in run.plain.parameters()]
    run.step()
    assert all(torch.equal(p, before) for p, before in zip(run.plain.parameters(), kept))
    assert run.optimizer.grad_norm == 0
    run.train("bcd", first_seed=8)
    run.backward(9)
    run.step(zero=False)
    run.step()  # the same gradients once more
    run.assert_same()


def test_a_step_without_a_backward_changes_nothing():
    run_on_ranks(2, each, EVERY, steps_without_a_backward)


def frozen_later(**options):
    run = SideBySide(momentum, **options)
    run.train(LAYERS)
    for model, _ in run.both:
        model.b.requires_grad_(False)
    kept = run.plain.b.weight.detach().clone()
    run.train(LAYERS, LAYERS, first_seed=1)
    assert torch.equal(run.plain.b.weight, kept)
    for model, _ in run.both:
        model.b.requires_grad_(True)
    run.train(LAYERS, "abc", first_seed=3)


def test_a_parameter_that_is_frozen_later_and_thawed_again():
    run_on_ranks(2, each, EVERY, frozen_later)


class Large(nn.Module):
    """A table that is cut into several buckets, between small parameters; `use` names what is used, in order."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.a = nn.Linear(9, 9)
            self.t = nn.Linear(900, 900, bias=False)
            self.b = nn.Linear(9, 9)

    def forward(self, x, use):
        for name in use:
            if name == "t":
                x = x + self.t(x.repeat(1, 100))[:, 400:409]
            else:
                x = torch.tanh(getattr(self, name)(x))
        return x.square().mean()


def cut_into_buckets(**options):
    def sgd(model):
        return SGD(model.parameters(), lr=0.05)

    def visited_twice(x):
        return checkpoint(
            lambda value: torch.tanh(value + run.plain.t(value.repeat(1, 100))[:, :9]), x, use_reentrant=True
        )

    run = SideBySide(sgd, model_fn=Large, **options)
    assert len(run.optimizer.reducer.buckets) == 4 + 3
    run.train("atb", "ab", "btta", "bt", ["tb", "a"])
    for micro, use in enumerate(("at", "tba", "b", "ta")):
        run.backward(20 + micro, use)
    run.step()
    run.assert_same()
    if options["stage"] == 1:
        with run.booster.no_sync(run.model, run.optimizer):
            run.backward(30, "ta")
            run.backward(31, "ab")
        run.backward(32, "t")
        run.step()
        run.assert_same()
    with run.optimizer.no_sync():
        run.backward(33, "at")
        run.backward(34, "bt")
    run.step()
    run.assert_same()
    x = [run.rows(40, rank).requires_grad_() for rank in range(run.ranks)]
    for value in x:
        inner = torch.tanh(value + run.one.t(value.repeat(1, 100))[:, :9])
        (run.one(inner, "at") / run.ranks).backward()
    run.booster.backward(run.model(visited_twice(x[run.rank]), "at"), run.optimizer)
    run.step()
    run.assert_same()


def test_a_parameter_that_is_cut_into_several_buckets():
    cases = [s | m | {"bucket_bytes": 1} for s in STAGES for m in ({}, {"overlap_communication": False})]
    run_on_ranks(2, each, cases, cut_into_buckets)


@on_ranks(2)
def test_a_parameter_that_was_frozen_at_boost_and_thawed_is_refused():
    def freeze(model, optimizer):
        model.b.requires_grad_(False)

    for stage in (1, 2):
        run = SideBySide(lambda model: SGD(model.parameters(), lr=0.1), freeze, stage=stage)
        run.train(LAYERS)
        for model, _ in run.both:
            model.b.requires_grad_(True)
        run.backward(1)
        with pytest.raises(UsageError, match="not averaged over data-parallel ranks"):
            run.step()


def resumed(stage):
    """The weights are carried over by hand; the state by state_dict, although units have been cut."""
    first = SideBySide(stage=stage).train("abcd", "ad", "abcd")
    second = SideBySide(stage=stage)
    with torch.no_grad():
        for mine, theirs in zip(second.plain.parameters(), first.plain.parameters()):
            mine.copy_(theirs)
    second.one.load_state_dict(first.one.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.one_optimizer.load_state_dict(first.one_optimizer.state_dict())
    assert second.counts() == first.counts()
    second.train("abcd", "bd", "abcd", first_seed=3)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_state_is_loaded_where_units_have_been_cut(ranks):
    for stage in (1, 2):
        run_on_ranks(ranks, resumed, stage)
