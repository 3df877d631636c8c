"""Region: entered once however many layers read its input, and a random stream of its own inside."""

import copy

import pytest
import torch
import torch.nn.functional as F
from layer_checks import assert_same_as_native, noise, with_noise
from torch import nn
from torch.utils.checkpoint import checkpoint

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_object
from colonnade.comm.ledger import ledger
from colonnade.shardformer.layer import Linear1D_Col, Linear1D_Row, Region
from colonnade.shardformer.layer import region as region_module
from colonnade.testing.ranks import on_ranks


class Block(nn.Module):
    """Three layers that read one tensor, one that closes; between them a dropout where `drop` > 0."""

    def __init__(self, drop=0.0, cross=False):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.drop, self.cross, self.fails = drop, cross, False

    def forward(self, x):
        other = x * 2 if self.cross else x
        y = self.q(x) * self.k(other) + self.v(other)
        y = F.dropout(y, self.drop, self.training)
        if self.fails:
            raise ValueError("in the middle of the region")
        return self.o(y)


def split(block, axis, region=True):
    """The block with its layers split; one region for all of them, or each on its own."""
    block = copy.deepcopy(block)
    shared = Region(axis) if region else None
    if shared is not None:
        shared.watch(block)
    for name in "qkv":
        setattr(block, name, Linear1D_Col.from_native_module(getattr(block, name), axis, region=shared))
    block.o = Linear1D_Row.from_native_module(block.o, axis, region=shared)
    return block


def backward_all_reduces(block):
    x = noise(4, 6).requires_grad_()
    y = block(x)
    with ledger() as book:
        y.sum().backward()
    return book.calls["all_reduce", "tp"]


def states_agree():
    states = all_gather_object(torch.get_rng_state(), Axis.of(None))
    return all(state.equal(states[0]) for state in states)


@on_ranks(2)
def test_three_readers_of_one_tensor_cost_one_all_reduce():
    axis, plain = Axis.of(None), with_noise(Block())
    together, apart = split(plain, axis), split(plain, axis, region=False)
    assert backward_all_reduces(together) == 1
    assert backward_all_reduces(apart) == 3
    for block in (together, apart):
        for _ in range(2):  # a second pass finds nothing left over from the first
            assert_same_as_native(block, plain, noise(4, 6))


@on_ranks(2)
def test_a_reader_of_another_tensor_enters_by_itself():
    axis, plain = Axis.of(None), with_noise(Block(cross=True))
    block = split(plain, axis)
    assert backward_all_reduces(block) == 2
    assert_same_as_native(block, plain, noise(4, 6))


@on_ranks(2)
def test_tensors_read_in_turn_are_never_taken_for_one_another():
    axis = Axis.of(None)
    layers = [with_noise(nn.Linear(6, 8), seed) for seed in range(3)]
    region = Region(axis)
    cut = [Linear1D_Col.from_native_module(copy.deepcopy(layer), axis, region=region) for layer in layers]
    closing = with_noise(nn.Linear(8, 6))
    row = Linear1D_Row.from_native_module(copy.deepcopy(closing), axis)
    a, b = noise(4, 6, seed=8), noise(4, 6, seed=9)

    def in_turn(first, second, third, close, x, y):
        return close(first(x) + second(y) + third(x))

    wanted_inputs = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    found_inputs = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    in_turn(*layers, closing, *wanted_inputs).sum().backward()
    in_turn(*cut, row, *found_inputs).sum().backward()
    for found, wanted in zip(found_inputs, wanted_inputs):
        torch.testing.assert_close(found.grad, wanted.grad)


@on_ranks(2)
def test_an_input_that_needs_no_gradient_costs_nothing():
    block = split(with_noise(Block()), Axis.of(None))
    with ledger() as book:
        block(noise(4, 6)).sum().backward()
    assert book.calls == {("all_reduce", "tp"): 1}
    with torch.no_grad(), ledger() as book:
        block(noise(4, 6))
    assert book.calls == {("all_reduce", "tp"): 1}


@on_ranks(2)
def test_nothing_is_kept_after_the_owners_forward():
    axis = Axis.of(None)
    block = split(with_noise(Block()), axis)
    region = block.q.region
    block(noise(4, 6).requires_grad_())
    assert region._seen is None and region._entry is None
    block.fails = True
    with pytest.raises(ValueError):
        block(noise(4, 6).requires_grad_())
    assert region._seen is None and region._entry is None


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("drop", [0.0, 0.5])
@on_ranks(2)
def test_recomputation_gives_the_same_numbers(drop, use_reentrant):
    axis = Axis.of(None)
    block = split(with_noise(Block(drop=drop)), axis)
    results = []
    for recompute in (False, True):
        torch.manual_seed(11)
        block.zero_grad()
        x = noise(4, 6).requires_grad_()
        y = checkpoint(block, x, use_reentrant=use_reentrant) if recompute else block(x)
        y = F.dropout(y, 0.5)  # outside the region: moves the common stream on between forward and recomputation
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad.clone() for p in block.parameters()), torch.get_rng_state()])
    for plain, recomputed in zip(*results):
        assert plain.equal(recomputed)
    assert states_agree()


@on_ranks(2)
def test_ranks_drop_different_entries_inside_and_draw_alike_outside():
    axis = Axis.of(None)
    block = split(with_noise(Block(drop=0.5)), axis)
    for name in "qkv":  # every entry inside is 1 on both ranks
        layer = getattr(block, name)
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.ones_(layer.bias)
    inside = []
    block.o.register_forward_pre_hook(lambda _, args: inside.append(args[0].detach().clone()))
    block(noise(64, 6))
    masks = all_gather_object(inside[0] == 0, axis)
    assert 0.3 < masks[0].float().mean() < 0.7
    assert not masks[0].equal(masks[1])
    assert states_agree()
    block.eval()
    block(noise(64, 6))
    outputs = all_gather_object(inside[1], axis)
    assert outputs[0].equal(outputs[1])


@on_ranks(2)
def test_the_common_stream_comes_back_after_an_exception():
    block = split(with_noise(Block(drop=0.5)), Axis.of(None))
    block.fails = True
    with pytest.raises(ValueError, match="in the middle of the region"):
        block(noise(4, 6))
    assert states_agree()
    block.fails = False
    torch.manual_seed(1)
    wanted = block(noise(4, 6))
    torch.manual_seed(1)
    assert block(noise(4, 6)).equal(wanted)


@on_ranks(2)
def test_a_region_without_dropout_draws_nothing():
    block = split(with_noise(Block()), Axis.of(None))
    state = torch.get_rng_state()
    block(noise(4, 6).requires_grad_()).sum().backward()
    assert torch.get_rng_state().equal(state)


def test_weight_gradients_are_made_while_the_input_gradient_travels(monkeypatch):
    events = []
    two = Axis("tp", 2, 0, (0, 1), None)
    monkeypatch.setattr(region_module, "all_reduce_async", lambda grad, axis: events.append("start"))
    monkeypatch.setattr(region_module, "wait", lambda work, axis: events.append("wait"))
    original = region_module.Tap.gradient
    monkeypatch.setattr(region_module.Tap, "gradient", lambda tap: events.append("weight") or original(tap))
    block, x = split(with_noise(Block()), two), noise(4, 6).requires_grad_()
    before = x * 2  # what comes before the region must find the finished sum
    before.register_hook(lambda grad: events.append("used"))
    y = block.q(before) * block.k(before) + block.v(before)
    y.sum().backward()
    assert events == ["start", "weight", "weight", "weight", "wait", "used"]
