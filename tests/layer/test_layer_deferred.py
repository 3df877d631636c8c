"""Linear layers whose weight gradient is left to a pass of its own: which they are, what is kept, what is ordinary."""

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from layer_checks import noise, with_noise
from torch import nn
from transformers.pytorch_utils import Conv1D

from colonnade.shardformer.layer.deferred import WeightGradients, split_backward


class Scaled(nn.Linear):
    def forward(self, input):
        return 3 * super().forward(input)


class ByItself(nn.Linear):
    def forward(self, input):
        return F.linear(input, self.weight, self.bias) + 1


class OwnConv1D(Conv1D):
    def forward(self, x):
        return super().forward(x) + 1


class Anything:
    """An object to be waited for."""


def both(make, x=None, run=lambda layer, x: layer(x)):
    """The same layer with its input: as it is, and prepared. Also how it is run, with noise as the output's gradient."""
    x = noise(2, 5, 4, seed=9) if x is None else x
    plain, split = with_noise(make()), with_noise(make())
    split_backward(split)
    y = run(plain, wanted_x := x.clone().requires_grad_())
    y.backward(noise(*y.shape, seed=11))
    return plain, wanted_x, split, x.clone().requires_grad_()


def check(make, x=None, run=lambda layer, x: layer(x)):
    """B and W give what an ordinary backward gives; no weight has a gradient between them."""
    plain, wanted_x, split, x = both(make, x, run)
    weights = WeightGradients()
    with weights.deferring():
        y = run(split, x)
    with weights.deferring():
        y.backward(noise(*y.shape, seed=11))
    torch.testing.assert_close(x.grad, wanted_x.grad, rtol=1e-12, atol=1e-13)
    assert all(p.grad is None for name, p in split.named_parameters() if name.endswith("weight"))
    weights.run()
    for (name, found), wanted in zip(split.named_parameters(), plain.parameters()):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-13, msg=name)


LAYERS = {
    "linear": lambda: nn.Linear(4, 3),
    "no bias": lambda: nn.Linear(4, 3, bias=False),
    "conv1d": lambda: Conv1D(3, 4),
    "scaled": lambda: Scaled(4, 3),
    "changed conv1d": lambda: OwnConv1D(3, 4),
    "two": lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)),
    "changed in place": lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), Conv1D(4, 6)),
    "changed in place, no bias": lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(inplace=True)),
    "changed conv1d in place": lambda: nn.Sequential(Conv1D(6, 4), nn.ReLU(inplace=True)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_b_makes_the_inputs_gradient_and_w_the_weights(layer):
    check(LAYERS[layer])


SHAPES = [(4,), (6, 4), (2, 3, 2, 4), (0, 4), (2, 0, 4)]
# Conv1D itself cannot view an empty input
OF_ANY_SHAPE = [
    (layer, s) for layer in ("linear", "no bias", "conv1d") for s in SHAPES[: 3 if layer == "conv1d" else 5]
]


@pytest.mark.parametrize(("layer", "shape"), OF_ANY_SHAPE)
def test_inputs_of_any_shape(layer, shape):
    check(LAYERS[layer], noise(*shape, seed=5))


def test_a_transposed_input():
    check(LAYERS["linear"], run=lambda layer, x: layer(x.transpose(0, 1)))


def test_a_layer_that_is_used_twice():
    check(lambda: nn.Linear(4, 4), run=lambda layer, x: layer(layer(x).tanh()))


def test_two_layers_with_one_weight():
    def tied():
        pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        pair[1].weight = pair[0].weight
        return pair

    check(tied)


def test_a_frozen_weight_is_left_alone():
    plain, wanted_x, split, x = both(lambda: nn.Linear(4, 3).requires_grad_(False))
    weights = WeightGradients()
    with weights.deferring():
        split(x).backward(noise(2, 5, 3, seed=11))
    assert torch.equal(x.grad, wanted_x.grad)
    assert weights.held_bytes == 0
    weights.run()
    assert split.weight.grad is None


def made_at_once(layer, x, context=None):
    """A layer's gradients are there after B."""
    weights = WeightGradients()
    with weights.deferring():
        with context or torch.enable_grad():
            y = layer(x)
        y.sum().backward()
    return weights.held_bytes == 0 and all(p.grad is not None for p in layer.parameters())


def test_what_cannot_be_split_is_made_at_once():
    layer = nn.Linear(4, 3)
    split_backward(layer)
    x = torch.randn(5, 4, requires_grad=True)
    assert not made_at_once(layer, x)
    assert made_at_once(layer, x.detach())
    assert made_at_once(layer, x, torch.autocast("cpu", torch.bfloat16))
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    split_backward(normed)
    assert made_at_once(normed, x)
    own = ByItself(4, 3)
    split_backward(own)
    assert type(own) is ByItself
    assert made_at_once(own, x)


def test_nothing_is_left_without_gradients():
    layer, weights = nn.Linear(4, 3), WeightGradients()
    split_backward(layer)
    with weights.deferring(), torch.no_grad():
        assert not layer(torch.randn(5, 4, requires_grad=True)).requires_grad
    weights.run()
    assert layer.weight.grad is None


def test_prepared_modules_are_the_ones_they_were():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": Conv1D(4, 4), "c": Scaled(4, 4), "d": nn.LayerNorm(4)})
    calls = []
    model["a"].register_forward_hook(lambda *_: calls.append("hook"))
    before = {name: (id(m), repr(m), type(m)) for name, m in model.named_modules()}
    names, parameters = list(model.state_dict()), [id(p) for p in model.parameters()]
    split_backward(model)
    classes = [type(m) for m in model.modules()]
    split_backward(model)
    assert [type(m) for m in model.modules()] == classes
    assert list(model.state_dict()) == names
    assert [id(p) for p in model.parameters()] == parameters
    for name, module in model.named_modules():
        identity, text, kind = before[name]
        assert (id(module), repr(module)) == (identity, text)
        assert isinstance(module, kind)
        assert (type(module).__name__, type(module).__module__) == (kind.__name__, kind.__module__)
    assert type(model["d"]) is nn.LayerNorm
    model["a"](torch.randn(4))
    assert calls == ["hook"]


def test_a_copy_of_a_prepared_layer_is_prepared_and_independent():
    layer = nn.Linear(4, 3)
    split_backward(layer)
    twin, weights = copy.deepcopy(layer), WeightGradients()
    with weights.deferring():
        twin(torch.randn(5, 4, requires_grad=True)).sum().backward()
    assert twin.weight.grad is None
    weights.run()
    assert twin.weight.grad is not None
    assert layer.weight.grad is None


def test_inputs_and_output_gradients_are_kept_and_nothing_else():
    readers = nn.ModuleList([nn.Linear(8, 6, bias=False), nn.Linear(8, 6, bias=False)])
    split_backward(readers)
    weights, source = WeightGradients(), torch.randn(10, 8, requires_grad=True)
    between = source.exp()
    held_by_graph = Anything()
    between.register_hook(lambda _, held=held_by_graph: None)
    graph = weakref.ref(held_by_graph)
    with weights.deferring():
        loss = sum(layer(between).square().sum() for layer in readers)
        assert weights.held_bytes == 0
        loss.backward()
    element = source.element_size()
    assert weights.held_bytes == (10 * 8 + 2 * 10 * 6) * element  # the input that both read, once
    kept = weakref.ref(between.untyped_storage())
    del loss, between, held_by_graph
    gc.collect()
    assert graph() is None  # what made the input is gone
    weights.run()
    assert weights.held_bytes == 0
    gc.collect()
    assert kept() is None


def test_w_holds_no_more_than_one_gradient_that_is_not_accumulated():
    layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    split_backward(layers)
    weights, held = WeightGradients(), []
    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(p.grad is not None for p in layers.parameters()))
        )
    with weights.deferring():
        layers(torch.randn(5, 4, requires_grad=True)).sum().backward()
    order = []
    for number, layer in enumerate(layers):
        layer.weight.register_hook(lambda _, number=number: order.append(number))
    weights.run()
    assert held == [1, 2, 3]
    assert order == [2, 1, 0]  # as a backward pass would


def test_callbacks_of_the_engine_come_at_the_end_of_w():
    layers, ended = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []
    split_backward(layers)
    weights = WeightGradients()
    with weights.deferring():
        layers(torch.randn(5, 4, requires_grad=True)).sum().backward()

    def end():
        ended.append([layer.weight.grad is not None for layer in layers])

    layers[1].weight.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(end))
    weights.run()
    assert ended == [[True, True]]


def test_a_pass_that_raises_leaves_nothing():
    layer, weights = nn.Linear(4, 3), WeightGradients()
    split_backward(layer)
    x = torch.randn(5, 4, requires_grad=True)
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), weights.deferring():
        layer(x * 1).sum().backward()
    assert weights.held_bytes == 0
    weights.run()
    assert layer.weight.grad is None
    assert made_at_once(layer, x.detach())


def test_a_backward_in_another_thread_finds_the_store():
    layer, weights = nn.Linear(4, 3), WeightGradients()
    split_backward(layer)
    with weights.deferring():
        loss = layer(torch.randn(5, 4, requires_grad=True)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert layer.weight.grad is None
    weights.run()
    assert layer.weight.grad is not None


def test_an_output_that_gets_no_gradient_leaves_nothing():
    layer, weights = nn.Linear(4, 3), WeightGradients()
    split_backward(layer)
    x = torch.randn(5, 4, requires_grad=True)
    with weights.deferring():
        unused, y = layer(x), layer(x)
        y.sum().backward()
    weights.run()
    torch.testing.assert_close(layer.weight.grad, x.detach().sum(0).expand(3, 4))
    assert unused.shape == (5, 3)
