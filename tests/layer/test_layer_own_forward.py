"""Subclasses of native layers with a forward of their own: taken over where they compute the same, refused where not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from layer_checks import assert_holds_weights_of, assert_same_as_native, noise, positions, with_noise
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear
from transformers.models.falcon.modeling_falcon import FalconLinear

from colonnade.cluster.mesh import Axis
from colonnade.errors import PolicyError
from colonnade.shardformer.layer import Linear1D_Col, Linear1D_Row, VocabParallelEmbedding1D
from colonnade.shardformer.layer.own_forward import computes_as
from colonnade.testing.ranks import on_ranks, run_on_ranks


class Scaled(nn.Linear):
    """A linear layer with the weight scaled by an attribute that is 1 in one model and 2 in another."""

    factor = 1.0

    def forward(self, x):
        return F.linear(x, self.weight * self.factor, self.bias)


class NoisyInTraining(nn.Linear):
    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return y + torch.randn_like(y) if self.training else y


class StopsTheGradient(nn.Linear):
    def forward(self, x):
        return F.linear(x.detach(), self.weight, self.bias)


class InSinglePrecision(nn.Linear):
    def forward(self, x):
        return F.linear(x.float(), self.weight.float(), self.bias.float()).to(x.dtype)


class ReturnsATuple(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias), None


class NeedsAnArgument(nn.Linear):
    def forward(self, x, scale):
        return F.linear(x, self.weight, self.bias) * scale


class OneHot(nn.Embedding):
    """Looks rows up by a product."""

    def forward(self, ids):
        return F.one_hot(ids, self.num_embeddings).to(self.weight.dtype) @ self.weight


class Shifted(nn.Embedding):
    def forward(self, ids):
        return F.embedding(ids + 2, self.weight)


def taken_over(native, world_class):
    axis = Axis.of(None)
    column = world_class is Linear1D_Col
    given = copy.deepcopy(native)
    weight = given.weight
    layer = world_class.from_native_module(given, axis)
    assert layer.weight is weight and isinstance(layer, type(native)) and isinstance(layer, world_class)
    assert type(layer).forward is world_class.forward
    assert_holds_weights_of(layer, native)
    into, out = (None, positions(11, axis)) if column else (positions(7, axis), None)
    assert_same_as_native(layer, native, noise(2, 5, 7), into=into, out=out)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("layer_class", [Linear1D_Col, Linear1D_Row])
def test_a_linear_layer_that_multiplies_by_itself_is_taken_over(world, layer_class):
    run_on_ranks(world, linear_layers, layer_class)


def linear_layers(layer_class):
    for kind in (FalconLinear, Scaled):
        for bias in (True, False):
            taken_over(with_noise(kind(7, 11, bias=bias)), layer_class)


@on_ranks(2)
def test_an_embedding_that_looks_up_by_itself_is_taken_over():
    native = with_noise(OneHot(13, 3))
    layer = VocabParallelEmbedding1D.from_native_module(copy.deepcopy(native))
    assert isinstance(layer, OneHot)
    assert_same_as_native(layer, native, torch.randint(13, (3, 9), generator=torch.Generator().manual_seed(2)))


def scaled_by_two():
    layer = Scaled(7, 11)
    layer.factor = 2.0
    return layer


@pytest.mark.parametrize(
    "make",
    [
        scaled_by_two, lambda: DeepseekV4GroupedLinear(7, 12, n_groups=2), lambda: NoisyInTraining(7, 11), lambda: StopsTheGradient(7, 11),
        lambda: InSinglePrecision(7, 11), lambda: ReturnsATuple(7, 11), lambda: NeedsAnArgument(7, 11),
    ],
)  # fmt: skip
def test_one_that_computes_something_else_stays_refused(make):
    module = make()
    state = torch.get_rng_state()
    with pytest.raises(PolicyError, match=f"cannot take the place of {type(module).__name__}: it multiplies in a"):
        Linear1D_Col.from_native_module(module, Axis("tp", 2, 0, (0, 1), None))
    assert torch.get_rng_state().equal(state)


def test_an_embedding_that_computes_something_else_stays_refused():
    with pytest.raises(PolicyError, match="cannot take the place of Shifted"):
        VocabParallelEmbedding1D.from_native_module(Shifted(13, 3), Axis("tp", 2, 0, (0, 1), None))


def test_a_module_on_the_meta_device_is_tried_on_the_cpu():
    with torch.device("meta"):
        native = FalconLinear(7, 11)
    layer = Linear1D_Col.from_native_module(native, Axis("tp", 2, 0, (0, 1), None))
    assert layer.weight.is_meta and layer.weight.shape == (6, 7)


def test_trying_leaves_the_module_as_it_was():
    native = with_noise(FalconLinear(7, 11))
    native.register_forward_hook(lambda *_: pytest.fail("the hooks of the module are not for the trial"))
    before = {name: p.clone() for name, p in native.named_parameters()}
    assert computes_as(native, nn.Linear)
    assert all(p.equal(before[name]) and p.grad is None for name, p in native.named_parameters())
