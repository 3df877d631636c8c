"""Which modules are gathered by themselves, and which rows a rank gets."""

import pytest
import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.fsdp import find_units
from colonnade.fsdp.shard import chunk_layout
from colonnade.model.layout import merge
from colonnade.shardformer.inference.trace import find_blocks
from colonnade.testing.tiny import tiny_model


def units_of(model):
    names = {module: name for name, module in model.named_modules()}
    return [names[unit] for unit in find_units(model, [model.get_submodule(path) for path in find_blocks(model)])]


def test_every_block_is_a_unit():
    assert units_of(tiny_model("LT")) == [f"model.layers.{i}" for i in range(4)]
    assert units_of(tiny_model("G2")) == ["transformer.h.0", "transformer.h.1"]
    assert units_of(tiny_model("MX")) == ["model.layers.0", "model.layers.1"], "experts are gathered with their block"


def test_blocks_that_share_a_parameter_are_gathered_together():
    model = tiny_model("LL")
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[2].mlp.up_proj.weight
    assert units_of(model) == ["model.layers.0", "model.layers.3"]
    layers[0].mlp.up_proj.weight = layers[0].mlp.gate_proj.weight
    assert units_of(model) == ["model.layers.0", "model.layers.3"], "shared within a block is no matter"


def test_a_block_that_stands_in_several_places_is_one_unit():
    block = nn.Linear(2, 2)
    model = nn.Sequential(nn.ModuleList([block, block, nn.Linear(2, 2)]), nn.Linear(2, 2))
    assert find_units(model, model[0]) == [block, model[0][2]]


def test_containers_and_empty_modules_are_no_units():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.ModuleList([nn.Linear(2, 2)]))
    assert find_units(model, list(model)) == [model[0]]
    assert find_units(model, [model]) == []


@pytest.mark.parametrize("shape", [(1, 3), (4, 2), (5,), (67, 2, 3), (2, 0)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_chunks_of_all_ranks_make_up_the_parameter(shape, ranks):
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    axes = [Axis("dp", ranks, rank, tuple(range(ranks)), None) for rank in range(ranks)]
    layouts = [chunk_layout(shape, axis) for axis in axes]
    pieces = [layout.extract(whole) for layout in layouts]
    assert merge(zip(pieces, layouts)).equal(whole)
    for piece, chunk in zip(pieces, whole.chunk(ranks)):
        assert piece.equal(chunk)
    assert all(layout.sharded_axes == ("dp",) for layout in layouts)
