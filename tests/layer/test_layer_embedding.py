"""Embeddings split by vocabulary and by width, each alone, against nn.Embedding and subclasses that models make of it."""

import copy

import pytest
import torch
from layer_checks import EXACT, assert_holds_weights_of, assert_same_as_native, positions, with_noise
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from colonnade.cluster.mesh import Axis
from colonnade.comm.ledger import ledger
from colonnade.errors import ConfigError, PolicyError, ShapeError
from colonnade.shardformer.layer import Embedding1D, VocabParallelEmbedding1D
from colonnade.testing.ranks import on_ranks, run_on_ranks

WIDTH = 7


class ScaledAndShifted(nn.Embedding):
    """An embedding that a model derives from nn.Embedding, with a state and a forward of its own."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("factor", torch.tensor(3.0, dtype=torch.float64))

    def forward(self, ids):
        return super().forward(ids) * self.factor + 1.0


def tokens(vocab, *extra):
    """Ids with repetitions, both ends of the vocabulary and the ones named."""
    ids = torch.randint(0, vocab, (3, 9), generator=torch.Generator().manual_seed(2))
    ids[0, :2] = torch.tensor([0, vocab - 1])
    for column, value in enumerate(extra):
        ids[1, column] = ids[2, column] = value
    return ids


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("layer_class", [VocabParallelEmbedding1D, Embedding1D])
def test_a_split_embedding_equals_the_native_one(world, layer_class):
    run_on_ranks(world, embeddings_alone, layer_class)


def embeddings_alone(layer_class):
    axis = Axis.of(None)
    for vocab in (66, 67):
        for padding in (None, 0, 20, 33, 34, vocab - 1, -1):
            native = with_noise(nn.Embedding(vocab, WIDTH, padding))
            check(layer_class, native, tokens(vocab, *([] if padding is None else [padding % vocab])), axis)


def check(layer_class, native, ids, axis, **kwargs):
    given = copy.deepcopy(native)
    weight = given.weight
    layer = layer_class.from_native_module(given, axis, **kwargs)
    assert layer.weight is weight
    assert_holds_weights_of(layer, native)
    assert_same_as_native(layer, native, ids)
    return layer


@pytest.mark.parametrize("layer_class", [VocabParallelEmbedding1D, Embedding1D])
@on_ranks(2)
def test_a_subclass_keeps_what_it_does_to_the_output(layer_class):
    axis = Axis.of(None)
    gemma = Gemma3TextScaledWordEmbedding(67, WIDTH, 0, embed_scale=2.5)
    gemma.embed_scale = gemma.embed_scale.double()
    for native in (gemma, ScaledAndShifted(67, WIDTH, 40)):
        layer = check(layer_class, with_noise(native), tokens(67, 40), axis)
        assert isinstance(layer, type(native))
        assert isinstance(layer, layer_class)


@on_ranks(3)
def test_an_embedding_split_by_width_may_leave_its_output_split():
    axis = Axis.of(None)
    native = with_noise(nn.Embedding(67, WIDTH, 4))
    layer = Embedding1D.from_native_module(copy.deepcopy(native), axis, gather_output=False)
    with ledger() as book:
        assert_same_as_native(layer, native, tokens(67, 4), out=positions(WIDTH, axis))
    assert not book.calls["all_gather", "tp"]


@on_ranks(2)
def test_an_embedding_split_by_width_may_count_frequencies():
    native = with_noise(nn.Embedding(67, WIDTH, scale_grad_by_freq=True))
    check(Embedding1D, native, tokens(67, 3, 3, 3), Axis.of(None))


@pytest.mark.parametrize("layer_class", [VocabParallelEmbedding1D, Embedding1D])
@on_ranks(3)
def test_constructors_draw_the_weights_of_the_native_constructor(layer_class):
    torch.manual_seed(4)
    native = nn.Embedding(67, WIDTH, 66, dtype=torch.float64)
    torch.manual_seed(4)
    layer = layer_class(67, WIDTH, 66, dtype=torch.float64, process_group=Axis.of(None))
    assert_holds_weights_of(layer, native)
    assert_same_as_native(layer, native, tokens(67, 66))


@on_ranks(2)
def test_the_vocabulary_costs_one_all_reduce_forward_and_nothing_backward():
    native = with_noise(nn.Embedding(67, WIDTH))
    layer = VocabParallelEmbedding1D.from_native_module(copy.deepcopy(native))
    with ledger() as forward:
        output = layer(tokens(67))
    with ledger() as backward:
        output.sum().backward()
    assert forward.calls == {("all_reduce", "tp"): 1}
    assert forward.elements == {("all_reduce", "tp"): 3 * 9 * WIDTH}
    assert not backward.calls
    with ledger() as width:
        Embedding1D.from_native_module(copy.deepcopy(native))(tokens(67)).sum().backward()
    assert width.calls == {("all_gather", "tp"): 1}


@pytest.mark.parametrize("layer_class", [VocabParallelEmbedding1D, Embedding1D])
@on_ranks(2)
def test_bf16_looks_up_the_same_rows(layer_class):
    native = with_noise(nn.Embedding(67, WIDTH, 1), dtype=torch.bfloat16)
    layer = layer_class.from_native_module(copy.deepcopy(native))
    assert layer(tokens(67)).equal(native(tokens(67)))
    assert_same_as_native(layer, native, tokens(67), close={"rtol": 2**-7, "atol": 2**-7})


@on_ranks(1)
def test_over_one_rank_it_is_the_native_one():
    native = with_noise(nn.Embedding(67, WIDTH, 1))
    for layer_class in (VocabParallelEmbedding1D, Embedding1D):
        assert_same_as_native(layer_class.from_native_module(copy.deepcopy(native)), native, tokens(67, 1), close=EXACT)


@on_ranks(2)
def test_ids_outside_the_vocabulary_are_named_on_every_rank():
    layer = VocabParallelEmbedding1D(67, WIDTH)
    for wrong in (67, -1, 10**9):
        ids = tokens(67)
        ids[2, 5] = wrong
        with pytest.raises(ShapeError, match=rf"must lie in 0\.\.66; found {wrong} at position \(2, 5\) \(1 such\)"):
            layer(ids)


@on_ranks(2)
def test_embeddings_whose_gradient_needs_all_rows_are_refused():
    for kwargs in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(PolicyError, match="cannot be split by vocabulary"):
            VocabParallelEmbedding1D.from_native_module(nn.Embedding(67, WIDTH, **kwargs))
    with pytest.raises(PolicyError, match="max_norm cannot be split by width"):
        Embedding1D.from_native_module(nn.Embedding(67, WIDTH, max_norm=1.0))
    with pytest.raises(PolicyError, match="replaces a Embedding, and was given a Linear"):
        VocabParallelEmbedding1D.from_native_module(nn.Linear(4, 4))


@on_ranks(3)
def test_fewer_rows_or_columns_than_ranks_are_refused():
    with pytest.raises(ConfigError, match="the vocabulary has 2 entries to share out over 3 ranks of tp"):
        VocabParallelEmbedding1D.from_native_module(nn.Embedding(2, WIDTH))
    with pytest.raises(ConfigError, match="the embedding width has 2 entries"):
        Embedding1D.from_native_module(nn.Embedding(67, 2))
