import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.model.layout import Range, TensorLayout, set_layout, shard_ranges
from colonnade.testing.logical import assemble, canonical_names, gather_parameters
from colonnade.testing.ranks import on_ranks

WHOLE = torch.arange(24.0).view(6, 4)


def piece(ranges, dim=0):
    layout = TensorLayout.split(WHOLE.shape, dim, [Range(*of) for of in ranges], "tp")
    return layout.extract(WHOLE), layout


def test_pieces_of_all_ranks_give_the_logical_tensor():
    found = assemble([piece([(0, 1), (3, 4)]), piece([(1, 3), (4, 6)])])
    assert found.value.equal(WHOLE)
    assert (found.missing, found.spread) == (0, 0.0)


def test_entries_that_no_rank_holds_are_counted():
    assert assemble([piece([(0, 2)]), piece([(4, 6)])]).missing == 8


def test_ranks_that_hold_the_same_entry_are_compared():
    first, second = piece([(0, 4)]), piece([(2, 6)])
    assert assemble([first, second]).spread == 0.0
    second[0][1, 1] += 0.5
    assert assemble([first, second]).spread == 0.5
    second[0][0, 0] = math.nan
    assert assemble([first, second]).spread == math.inf


def test_a_local_tensor_that_belies_its_layout_is_refused():
    local, layout = piece([(0, 3)])
    with pytest.raises(ValueError, match=r"shape \(2, 4\) does not hold"):
        assemble([(local[:2], layout)])
    with pytest.raises(ValueError, match="disagree"):
        assemble([(local, layout), (torch.zeros(2, 4), TensorLayout.whole((2, 4)))])


def test_tied_weights_have_one_canonical_name():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "norm": nn.LayerNorm(3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    names = canonical_names(model)
    assert names["head.weight"] == names["embed.weight"] == "embed.weight"
    assert names["norm.weight"] == "norm.weight"


@on_ranks(2)
def test_parameters_are_gathered_from_the_ranks_by_their_layouts():
    rank, world = dist.get_rank(), Axis.of(None, "world")
    layout = TensorLayout.split(WHOLE.shape, 0, shard_ranges(6, rank, 2, pieces=[4, 2]), "tp")
    model = nn.Module()
    model.packed = nn.Parameter(layout.extract(WHOLE))
    set_layout(model.packed, layout.named("qkv.weight"))
    model.norm = nn.Parameter(torch.full((3,), float(rank)))
    if rank == 1:
        model.only_here = nn.Parameter(torch.ones(2))
    found = gather_parameters(model, lambda p: p, {"norm": "final.norm"}, world)
    assert found["qkv.weight"].value.equal(WHOLE)
    assert found["final.norm"].spread == 1.0
    assert found["only_here"].value.equal(torch.ones(2))
    assert gather_parameters(model, lambda p: p.grad, {}, world) == {}
