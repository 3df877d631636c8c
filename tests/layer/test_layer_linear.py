"""Column- and row-parallel linear layers, each alone, against nn.Linear and transformers' Conv1D."""

import copy

import pytest
import torch
import torch.distributed as dist
from layer_checks import assert_holds_weights_of, assert_same_as_native, noise, positions, shares, with_noise
from torch import nn
from transformers.pytorch_utils import Conv1D

from colonnade.cluster.mesh import Axis
from colonnade.comm.ledger import ledger
from colonnade.errors import ConfigError, PolicyError
from colonnade.shardformer.layer import (
    Conv1D_Col,
    Conv1D_Row,
    FusedLinear1D_Col,
    FusedLinearConv1D_Col,
    Linear1D_Col,
    Linear1D_Row,
    VocabParallelLMHead1D,
)
from colonnade.testing.ranks import on_ranks, run_on_ranks

# what is fused in the output, and in how many blocks each part may be cut: sizes that divide, and sizes that do not
COLUMNS = [
    {"out": 12},
    {"out": 11},
    {"out": 12, "units": 6},
    {"out": 20, "units": 5},
    {"out": 18, "pieces": 3},
    {"out": 21, "pieces": 3},
    {"out": 24, "pieces": 3, "units": 4},
    {"out": 19, "pieces": (9, 5, 5)},
    {"out": 32, "pieces": (16, 8, 8), "units": 4},
    {"out": 36, "units": 9},
    # fewer blocks than ranks: held by several, or cut into heads
    {"out": 4, "units": 1},
    {"out": 6, "units": 2},
    {"out": 24, "units": 2, "heads": 6},
    {"out": 20, "pieces": (16, 2, 2), "units": 1, "heads": (8, None, None)},
    {"out": 32, "pieces": (24, 4, 4), "units": 2, "heads": (6, None, None)},
    {"out": 30, "pieces": 3, "units": 1, "heads": 5},
]


def column_layer_alone(native_class, layer_class, out, pieces=1, units=None, heads=None, bias=True):
    axis = Axis.of(None)
    native = with_noise(nn.Linear(7, out, bias=bias) if native_class is nn.Linear else Conv1D(out, 7))
    x = noise(2, 5, 7)
    for gather in (False, True):
        given = copy.deepcopy(native)
        weight = given.weight
        options = {"gather_output": gather, "pieces": pieces, "units": units, "heads": heads}
        layer = layer_class.from_native_module(given, axis, **options)
        assert layer.weight is weight, "the Parameter is the one that was given"
        assert_holds_weights_of(layer, native)
        cut = (out, axis, pieces, units, heads)
        held = positions(*cut)
        assert layer.out_features == len(held)
        if gather:  # every rank has the whole output, and its whole gradient
            assert_same_as_native(layer, native, x)
        else:
            assert_same_as_native(layer, native, x, out=held, share=shares(*cut))
        assert f"of {out} columns on tp {axis.rank}/{axis.size}" in repr(layer)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_column_parallel_linear_layer_equals_the_native_one(world):
    run_on_ranks(world, every_column_case, nn.Linear, Linear1D_Col)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_column_parallel_conv1d_equals_the_native_one(world):
    run_on_ranks(world, every_column_case, Conv1D, Conv1D_Col)


def every_column_case(native_class, layer_class):
    for case in COLUMNS:
        column_layer_alone(native_class, layer_class, **case)
    if native_class is nn.Linear:
        column_layer_alone(native_class, layer_class, out=11, bias=False)


@pytest.mark.parametrize("native_class, layer_class", [(nn.Linear, FusedLinear1D_Col), (Conv1D, FusedLinearConv1D_Col)])
@pytest.mark.parametrize("world", [2, 3])
def test_a_fused_layer_has_three_parts_unless_told_otherwise(world, native_class, layer_class):
    run_on_ranks(world, fused_layer_alone, native_class, layer_class)


def fused_layer_alone(native_class, layer_class):
    axis = Axis.of(None)
    native = with_noise(nn.Linear(7, 24) if native_class is nn.Linear else Conv1D(24, 7))
    layer = layer_class.from_native_module(copy.deepcopy(native), axis)
    assert_holds_weights_of(layer, native)
    assert_same_as_native(layer, native, noise(2, 5, 7), out=positions(24, axis, 3))
    column_layer_alone(native_class, layer_class, out=24, pieces=2, units=4)
    column_layer_alone(native_class, layer_class, out=14, pieces=(8, 3, 3))


@on_ranks(2)
def test_a_fused_layer_made_by_its_constructor_has_three_parts_too():
    axis = Axis.of(None)
    torch.manual_seed(4)
    native = nn.Linear(7, 24, dtype=torch.float64)
    torch.manual_seed(4)
    layer = FusedLinear1D_Col(7, 24, dtype=torch.float64, process_group=axis)
    assert_holds_weights_of(layer, native)
    assert_same_as_native(layer, native, noise(2, 5, 7), out=positions(24, axis, 3))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_row_parallel_layer_equals_the_native_one(world):
    run_on_ranks(world, every_row_case)


ROWS = [  # width, blocks, heads
    (12, None, None),
    (11, None, None),
    (20, 5, None),
    (36, 9, None),
    (24, 2, 6),
    (16, 1, 4),
]


def every_row_case():
    axis = Axis.of(None)
    for width, units, heads in ROWS:
        row_layer_alone(Linear1D_Row, with_noise(nn.Linear(width, 7)), width, units, heads, axis)
        row_layer_alone(Conv1D_Row, with_noise(Conv1D(7, width)), width, units, heads, axis)
    row_layer_alone(Linear1D_Row, with_noise(nn.Linear(11, 7, bias=False)), 11, None, None, axis)


def row_layer_alone(layer_class, native, width, units, heads, axis):
    held = positions(width, axis, 1, units, heads)
    for parallel_input in (True, False):
        given = copy.deepcopy(native)
        weight, bias = given.weight, given.bias
        options = {"parallel_input": parallel_input, "units": units, "heads": heads}
        layer = layer_class.from_native_module(given, axis, **options)
        assert layer.weight is weight and layer.bias is bias
        assert layer.in_features == len(held)
        assert_holds_weights_of(layer, native)
        assert_same_as_native(layer, native, noise(2, 5, width), into=held if parallel_input else None)
        assert f"of {width} rows on tp {axis.rank}/{axis.size}" in repr(layer)


@pytest.mark.parametrize("world", [2, 3])
def test_constructors_draw_the_weights_of_the_native_constructor(world):
    run_on_ranks(world, layers_by_constructor)


def layers_by_constructor():
    axis = Axis.of(None)
    for layer_class, kwargs in (
        (Linear1D_Col, {}),
        (Linear1D_Col, {"pieces": (6, 3, 3), "units": 3}),
        (Linear1D_Col, {"bias": False, "gather_output": True}),
        (Linear1D_Row, {}),
        (Linear1D_Row, {"bias": False, "parallel_input": False}),
        (VocabParallelLMHead1D, {"bias": False}),
    ):
        torch.manual_seed(4)
        native = nn.Linear(12, 12, kwargs.get("bias", True), dtype=torch.float64)
        torch.manual_seed(4)
        layer = layer_class(12, 12, dtype=torch.float64, process_group=axis, **kwargs)
        assert_holds_weights_of(layer, native)
        held = positions(12, axis, kwargs.get("pieces", 1), kwargs.get("units"))
        into = held if layer_class is Linear1D_Row and kwargs.get("parallel_input", True) else None
        out = held if layer_class is not Linear1D_Row and not kwargs.get("gather_output") else None
        assert_same_as_native(layer, native, noise(2, 5, 12), into=into, out=out)


@pytest.mark.parametrize("world", [2, 3])
def test_a_language_model_head_deals_out_an_odd_vocabulary(world):
    run_on_ranks(world, head_alone)


def head_alone():
    axis = Axis.of(None)
    for vocab, bias in ((66, False), (67, True), (67, False)):
        native = with_noise(nn.Linear(7, vocab, bias=bias))
        for gather in (False, True):
            layer = VocabParallelLMHead1D.from_native_module(copy.deepcopy(native), axis, gather_output=gather)
            assert layer.vocab_size == vocab
            assert_holds_weights_of(layer, native)
            assert_same_as_native(layer, native, noise(2, 5, 7), out=None if gather else positions(vocab, axis))


@on_ranks(2)
def test_column_then_row_equals_a_plain_mlp_with_one_all_reduce_each_way():
    axis = Axis.of(None)
    up, down = with_noise(nn.Linear(7, 12)), with_noise(nn.Linear(12, 7), seed=2)
    plain = nn.Sequential(up, nn.GELU(), down)
    split = nn.Sequential(
        Linear1D_Col.from_native_module(copy.deepcopy(up), axis),
        nn.GELU(),
        Linear1D_Row.from_native_module(copy.deepcopy(down), axis),
    )
    with ledger() as book:
        assert_same_as_native(split, plain, noise(2, 5, 7))
    assert book.calls["all_reduce", "tp"] == 2
    assert book.elements["all_reduce", "tp"] == 2 * 2 * 5 * 7


@on_ranks(2)
def test_a_plain_process_group_and_no_group_mean_the_same_ranks():
    native = with_noise(nn.Linear(7, 12))
    for group in (None, dist.group.WORLD, Axis.of(None)):
        layer = Linear1D_Col.from_native_module(copy.deepcopy(native), group)
        assert_same_as_native(layer, native, noise(3, 7), out=positions(12, Axis.of(None)))


@on_ranks(1)
def test_over_one_rank_every_layer_is_the_native_one():
    for layer_class, native in (
        (Linear1D_Col, nn.Linear(7, 12)),
        (FusedLinear1D_Col, nn.Linear(7, 12)),
        (Linear1D_Row, nn.Linear(7, 12)),
        (Conv1D_Col, Conv1D(12, 7)),
        (FusedLinearConv1D_Col, Conv1D(12, 7)),
        (Conv1D_Row, Conv1D(12, 7)),
        (VocabParallelLMHead1D, nn.Linear(7, 12)),
    ):
        native = with_noise(native)
        with ledger() as book:
            assert_same_as_native(layer_class.from_native_module(copy.deepcopy(native)), native, noise(2, 5, 7))
        assert not {key: n for key, n in book.calls.items() if key[0] != "all_gather_object"}


@on_ranks(2)
def test_bf16_layers_follow_the_native_ones_within_rounding():
    axis = Axis.of(None)
    bf16 = torch.bfloat16
    close = {"rtol": 2**-6, "atol": 2**-4}  # sums of a dozen terms of size 1 with 8 bits each, added in another order
    x = noise(2, 5, 12, dtype=bf16)
    native = with_noise(nn.Linear(12, 12), dtype=bf16)
    held = positions(12, axis)
    column = Linear1D_Col.from_native_module(copy.deepcopy(native), axis)
    assert column(x).dtype is bf16
    assert_same_as_native(column, native, x, out=held, close=close)
    row = Linear1D_Row.from_native_module(copy.deepcopy(native), axis)
    assert_same_as_native(row, native, x, into=held, close=close)
    conv = with_noise(Conv1D(12, 12), dtype=bf16)
    fused = FusedLinearConv1D_Col.from_native_module(copy.deepcopy(conv), axis)
    assert_same_as_native(fused, conv, x, out=positions(12, axis, 3), close=close)


@on_ranks(2)
def test_a_gradient_that_is_there_already_is_cut_with_its_parameter():
    axis = Axis.of(None)
    native = with_noise(nn.Linear(7, 12))
    native(noise(3, 7)).square().sum().backward()
    wanted = native.weight.grad.clone()
    layer = Linear1D_Col.from_native_module(native, axis)
    assert layer.weight.grad.equal(wanted[positions(12, axis)])


@on_ranks(2)
def test_hooks_mode_and_attributes_of_the_native_module_stay():
    native = nn.Linear(7, 12).eval()
    native.note = "kept"
    seen = []
    native.register_forward_hook(lambda *_: seen.append(1))
    layer = Linear1D_Col.from_native_module(native)
    layer(torch.zeros(1, 7))
    assert (layer.training, layer.note, seen) == (False, "kept", [1])
    assert isinstance(layer, nn.Linear)


@on_ranks(2)
def test_a_module_of_another_kind_is_refused():
    for layer_class, wrong, says in (
        (Linear1D_Col, nn.Embedding(4, 4), "Linear1D_Col replaces a Linear, and was given a Embedding"),
        (Linear1D_Row, nn.LayerNorm(4), "Linear1D_Row replaces a Linear, and was given a LayerNorm"),
        (FusedLinear1D_Col, Conv1D(6, 4), "FusedLinear1D_Col replaces a Linear, and was given a Conv1D"),
        (Conv1D_Col, nn.Linear(4, 4), "Conv1D_Col replaces a Conv1D, and was given a Linear"),
        (Conv1D_Row, nn.Conv1d(4, 4, 1), "Conv1D_Row replaces a Conv1D, and was given a Conv1d"),
    ):
        with pytest.raises(PolicyError, match=says):
            layer_class.from_native_module(wrong)


@on_ranks(3)
def test_a_share_of_nothing_is_refused_on_every_rank():
    with pytest.raises(ConfigError, match=r"the output of Linear1D_Col has 2 entries to share out over 3 ranks of tp"):
        Linear1D_Col.from_native_module(nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=r"the input of Linear1D_Row has 2 heads .*\n.*\n.*tp_size=2 or less"):
        Linear1D_Row.from_native_module(nn.Linear(4, 4), units=2)
    with pytest.raises(ConfigError, match=r"the output of Linear1D_Col has 2 heads .*\n.*\n.*tp_size=2 or less"):
        Linear1D_Col.from_native_module(nn.Linear(4, 6), pieces=3, units=1, heads=[2, None, None])


@on_ranks(4)
def test_the_gradient_of_a_block_that_several_ranks_hold_is_summed_in_each_backward_pass():
    """Two blocks of 3 entries on four ranks: summed in place of the two, whichever rank holds them."""
    axis, x = Axis.of(None), noise(5, 7)
    native = with_noise(nn.Linear(7, 6))
    layer = Linear1D_Col.from_native_module(copy.deepcopy(native), axis, units=2)
    held, share = positions(6, axis, 1, 2), shares(6, axis, 1, 2)
    upstream = noise(5, 6, seed=5)
    native(x).backward(upstream)
    for times in (1, 2):
        with ledger() as book:
            layer(x).backward(upstream[:, held] * share)
        torch.testing.assert_close(layer.weight.grad, times * native.weight.grad[held])
        torch.testing.assert_close(layer.bias.grad, times * native.bias.grad[held])
        assert book.calls["all_reduce", "tp"] == 2, "weight and bias; the input needs no gradient"
        assert book.elements["all_reduce", "tp"] == 6 * 7 + 6


@on_ranks(2)
def test_a_block_that_both_ranks_hold_may_be_frozen_and_thawed():
    axis, x = Axis.of(None), noise(5, 7)
    native = with_noise(nn.Linear(7, 3))
    native(x).backward(noise(5, 3, seed=5))
    layer = Linear1D_Col.from_native_module(copy.deepcopy(native), axis, units=1)
    upstream = noise(5, 3, seed=5) * shares(3, axis, 1, 1)
    layer.weight.requires_grad_(False)
    with ledger() as book:
        layer(x).backward(upstream)
    assert layer.weight.grad is None
    assert book.elements["all_reduce", "tp"] == 3, "the bias alone"
    layer.weight.requires_grad_(True)
    layer(x).backward(upstream)
    torch.testing.assert_close(layer.weight.grad, native.weight.grad)
