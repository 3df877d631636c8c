"""Dropout: common masks where ranks hold the same activations, own masks where they hold different ones."""

import pytest
import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather, all_gather_object
from colonnade.errors import PolicyError
from colonnade.shardformer.layer import DropoutForParallelInput, DropoutForReplicatedInput
from colonnade.testing.ranks import on_ranks

BOTH = [DropoutForParallelInput, DropoutForReplicatedInput]


def on_all_ranks(tensor):
    return all_gather(tensor.detach(), Axis.of(None))


def states_agree():
    states = all_gather_object(torch.get_rng_state(), Axis.of(None))
    return all(state.equal(states[0]) for state in states)


@on_ranks(3)
def test_replicated_input_gets_one_mask_and_parallel_input_gets_one_for_each_rank():
    x = torch.ones(40, 50)
    common = on_all_ranks(DropoutForReplicatedInput(0.5)(x))
    assert all(mask.equal(common[0]) for mask in common)
    own = on_all_ranks(DropoutForParallelInput(0.5)(x))
    for a in range(3):
        for b in range(a):
            assert 0.4 < (own[a] == own[b]).float().mean() < 0.6, "two ranks' masks are not independent"
    assert states_agree(), "after the region all ranks draw alike again"
    assert all(mask.equal(common[0]) is False for mask in own)


@on_ranks(2)
def test_successive_masks_differ_and_the_same_state_gives_the_same_masks():
    x = torch.ones(40, 50)
    for layer in (DropoutForParallelInput(0.5), DropoutForReplicatedInput(0.5)):
        torch.manual_seed(3)
        first, second = layer(x), layer(x)
        assert not first.equal(second)
        torch.manual_seed(3)
        assert layer(x).equal(first)
        assert layer(x).equal(second)


@pytest.mark.parametrize("layer_class", BOTH)
@on_ranks(2)
def test_kept_entries_and_their_gradients_are_scaled(layer_class):
    layer = layer_class.from_native_module(nn.Dropout(0.25))
    x = torch.ones(100, 100, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert set(y.detach().unique().tolist()) <= {0.0, torch.tensor(1 / 0.75).item()}
    assert 0.23 < (y == 0).float().mean() < 0.27
    assert x.grad.equal(y)


@pytest.mark.parametrize("layer_class", BOTH)
@on_ranks(2)
def test_evaluation_and_probability_zero_change_nothing_and_draw_nothing(layer_class):
    x, state = torch.ones(5), torch.get_rng_state()
    assert layer_class(0.5).eval()(x).equal(x)
    assert layer_class(0.0)(x).equal(x)
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("layer_class", BOTH)
@on_ranks(2)
def test_a_native_dropout_is_taken_over_with_its_probability_and_mode(layer_class):
    layer = layer_class.from_native_module(nn.Dropout(0.25, inplace=True).eval(), Axis.of(None))
    assert (layer.p, layer.inplace, layer.training) == (0.25, True, False)
    x = torch.ones(50, 50)
    y = layer.train()(x)
    assert y.data_ptr() == x.data_ptr()
    with pytest.raises(PolicyError, match="replaces a Dropout, and was given a Linear"):
        layer_class.from_native_module(nn.Linear(2, 2))


@on_ranks(2)
def test_the_stream_comes_back_when_dropout_itself_fails():
    layer = DropoutForParallelInput(0.5)
    with pytest.raises(RuntimeError):
        layer(torch.ones(3, dtype=torch.int64))  # whole numbers cannot be scaled
    assert states_agree()
