"""GradientReducer: whatever the buckets, the gradient on every rank is the mean of the ranks' own."""

import copy

import pytest
import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_object
from colonnade.comm.ledger import ledger
from colonnade.comm.reducer import GradientReducer
from colonnade.testing.ranks import on_ranks, run_on_ranks

BUCKETS = [1, 1 << 10, 1 << 30]
LAYERS = "abcd"


class Net(nn.Module):
    """Layers that a rank may use in any order, or not at all."""

    def __init__(self, dtypes=(torch.float32,) * 4):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, dtype in zip(LAYERS, dtypes):
            layer = nn.Linear(9, 9)
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
            setattr(self, name, layer.to(dtype))

    def forward(self, x, use=LAYERS):
        for name in use:
            layer = getattr(self, name)
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float().square().mean()


def rows(axis, step=0):
    generator = torch.Generator().manual_seed(100 * step + axis.rank)
    return torch.randn(4, 9, generator=generator)


def mean_of_own_gradients(model, calls, axis):
    """By name, the mean over ranks of the sum of each rank's own gradients; None for what no rank used.

    Args:
        calls: (input, layers used) of each backward of this rank.
    """
    model = copy.deepcopy(model)
    for x, use in calls:
        model(x, use).backward()
    mine = {name: p.grad for name, p in model.named_parameters()}
    found = all_gather_object(mine, axis)
    means = {}
    for name in mine:
        used = [grads[name].double() for grads in found if grads[name] is not None]
        means[name] = sum(used) / axis.size if used else None
    return means


def assert_gradients(model, wanted, close=None):
    for name, parameter in model.named_parameters():
        if wanted[name] is None:
            assert parameter.grad is None, f"{name} was used by no rank and has a gradient"
        else:
            assert parameter.grad is not None, f"{name} was used and has no gradient"
            assert parameter.grad.dtype is parameter.dtype
            torch.testing.assert_close(
                parameter.grad.double(),
                wanted[name],
                **(close or {"rtol": 1e-5, "atol": 1e-7}),
                msg=lambda m, n=name: f"{n}: {m}",
            )


def step(model, reducer, x, use=LAYERS):
    reducer.backward(model(x, use))


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_the_mean_over_ranks(world, bucket_bytes):
    run_on_ranks(world, several_steps, bucket_bytes)


def several_steps(bucket_bytes):
    axis = Axis.of(None)
    plain, model = Net(), Net()
    reducer = GradientReducer(model.parameters(), axis, bucket_bytes)
    if bucket_bytes == 1:
        assert len(reducer.buckets) == 8
    for number, set_to_none in enumerate((True, False, True)):
        x = rows(axis, number)
        step(model, reducer, x)
        assert_gradients(model, mean_of_own_gradients(plain, [(x, LAYERS)], axis))
        model.zero_grad(set_to_none)


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@on_ranks(2)
def test_layers_that_some_rank_or_no_rank_used(bucket_bytes):
    axis = Axis.of(None)
    plain, model = Net(), Net()
    reducer = GradientReducer(model.parameters(), axis, bucket_bytes)
    for number, uses in enumerate((("abcd", "abcd"), ("abd", "abd"), ("ab", "cd"), ("bd", "bcd"), ("abcd", "dcba"))):
        x, use = rows(axis, number), uses[axis.rank]
        step(model, reducer, x, use)
        assert_gradients(model, mean_of_own_gradients(plain, [(x, use)], axis))
        model.zero_grad()


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@on_ranks(2)
def test_several_backwards_add_up_with_and_without_pause(bucket_bytes, paused):
    """Also where the ranks use different layers in each of them."""
    axis = Axis.of(None)
    plain, model = Net(), Net()
    reducer = GradientReducer(model.parameters(), axis, bucket_bytes)
    for uses in (
        (("abcd",) * 3,) * 2,
        (("abcd", "ab", "a"), ("dc", "abcd", "cd")),
        (("a", "a", "a"), ("b", "bc", "b")),
    ):
        calls = [(rows(axis, number), use) for number, use in enumerate(uses[axis.rank])]
        for number, (x, use) in enumerate(calls):
            if paused and number < 2:
                with reducer.paused(), ledger() as book:
                    step(model, reducer, x, use)
                assert not book.calls
            else:
                step(model, reducer, x, use)
        assert_gradients(model, mean_of_own_gradients(plain, calls, axis))
        model.zero_grad()


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@on_ranks(2)
def test_parameters_of_several_formats(bucket_bytes):
    axis = Axis.of(None)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.bfloat16)
    plain, model = Net(dtypes), Net(dtypes)
    reducer = GradientReducer(model.parameters(), axis, bucket_bytes)
    for uses in (("abcd", "abcd"), ("ab", "cd")):
        x, use = rows(axis), uses[axis.rank]
        step(model, reducer, x, use)
        wanted = mean_of_own_gradients(plain, [(x, use)], axis)
        assert_gradients(model, wanted, {"rtol": 2**-7, "atol": 2**-12})  # one rounding to 8 bits for each rank
        model.zero_grad()


@on_ranks(2)
def test_every_element_travels_once_a_step_and_once_after_a_pause():
    axis = Axis.of(None)
    model = Net()
    elements = sum(p.numel() for p in model.parameters())
    for bucket_bytes in BUCKETS:
        reducer = GradientReducer(model.parameters(), axis, bucket_bytes)
        for pauses in (0, 2):
            with ledger() as book:
                with reducer.paused():
                    for number in range(pauses):
                        step(model, reducer, rows(axis, number))
                step(model, reducer, rows(axis, pauses))
            assert book.elements["all_reduce", "tp"] == elements
            assert book.calls["all_reduce", "tp"] == len(reducer.buckets)
            assert book.elements["all_gather", "tp"] == 2 * axis.size
        model = Net()  # without the hooks of this reducer


@on_ranks(2)
def test_reduction_begins_while_backward_is_still_running():
    axis = Axis.of(None)
    model = Net()
    reducer = GradientReducer(model.parameters(), axis, bucket_bytes=1)
    launched = []
    model.a.weight.register_post_accumulate_grad_hook(lambda _: launched.append(reducer._next))
    step(model, reducer, rows(axis))
    assert launched[0] >= 6


@on_ranks(2)
def test_frozen_parameters_take_no_part():
    axis = Axis.of(None)
    plain, model = Net(), Net()
    for net in (plain, model):
        net.b.requires_grad_(False)
        net.c.bias.requires_grad_(False)
    reducer = GradientReducer(model.parameters(), axis, 1 << 10)
    step(model, reducer, rows(axis))
    wanted = mean_of_own_gradients(plain, [(rows(axis), LAYERS)], axis)
    assert wanted["b.weight"] is None
    assert_gradients(model, wanted)


@on_ranks(2)
def test_a_parameter_frozen_for_a_while_is_passed_over():
    axis = Axis.of(None)
    plain, model = Net(), Net()
    reducer = GradientReducer(model.parameters(), axis, 1 << 10)
    for train in (True, False, True):
        for net in (plain, model):
            net.b.requires_grad_(train)
        step(model, reducer, rows(axis))
        assert_gradients(model, mean_of_own_gradients(plain, [(rows(axis), LAYERS)], axis))
        model.zero_grad()


@on_ranks(2)
def test_a_pause_ends_also_after_an_exception():
    axis = Axis.of(None)
    plain, model = Net(), Net()
    reducer = GradientReducer(model.parameters(), axis)
    with pytest.raises(ValueError), reducer.paused():
        raise ValueError
    step(model, reducer, rows(axis))
    assert_gradients(model, mean_of_own_gradients(plain, [(rows(axis), LAYERS)], axis))


@on_ranks(1)
def test_over_one_rank_nothing_happens():
    model = Net()
    reducer = GradientReducer(model.parameters(), Axis.of(None))
    with ledger() as book:
        step(model, reducer, rows(Axis.of(None)))
    assert not book.calls
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_sparse_gradients_are_averaged_as_dense_ones():
    axis = Axis.of(None, "dp")
    table = nn.Embedding(7, 3, sparse=True)
    with torch.no_grad():
        table.weight.copy_(torch.arange(21.0).view(7, 3))
    reducer = GradientReducer(table.parameters(), axis)
    reducer.backward(table(torch.tensor([axis.rank, 5])).square().sum())
    wanted = torch.zeros(7, 3)
    for row, times in ((0, 1), (1, 1), (5, 2)):
        wanted[row] = times * 2 * table.weight[row].detach() / 2
    assert torch.equal(table.weight.grad, wanted)
