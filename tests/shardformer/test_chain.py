"""The chain of a model: its calls, and what each of them is made of."""

import pytest
import torch
from torch import nn

from colonnade.model.chain import Leaf
from colonnade.shardformer.inference.chain import chain_of, units_of
from colonnade.shardformer.inference.origins import Drawn, Inside, Origins, PythonReads, Weight
from colonnade.testing.tiny import tiny_model


class Small(nn.Module):
    """Embedding, three blocks with what a subclass does between them, head."""

    def __init__(self):
        super().__init__()
        self.embed, self.scale = nn.Embedding(11, 4), nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(3)])
        self.head = nn.Linear(4, 11)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(x)


def reads_by_path(chain):
    return {call.path: {chain.calls[leaf.call].path for leaf in call.reads} for call in chain.calls}


@pytest.mark.parametrize("name", ["LT", "G2", "LL"])
def test_blocks_read_the_block_before(name):
    chain = chain_of(tiny_model(name))
    blocks = chain.blocks
    for before, number in zip(blocks, blocks[1:]):
        assert {leaf.call for leaf in chain.calls[number].reads} == {before}
    assert not chain.bound and not chain.everywhere and not chain.altered


def test_the_model_is_not_changed():
    model = tiny_model("LT").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    chain_of(model)
    assert not model.training and all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_parameters_of_no_unit_are_everywhere():
    chain = chain_of(Small())
    assert chain.everywhere == {"scale"}
    assert reads_by_path(chain) == {
        "embed": set(),
        "blocks.0": {"embed"},
        "blocks.1": {"blocks.0"},
        "blocks.2": {"blocks.1"},
        "head": {"blocks.2"},
    }
    assert {leaf.call for leaf in chain.output_reads} == {4}


def test_units():
    assert units_of(Small()) == {f"blocks.{i}": True for i in range(3)} | {"embed": False, "head": False}
    names = units_of(tiny_model("G2"))
    assert names["transformer.h.0"] and not names["transformer.wte"] and "transformer.drop" in names
    assert not any(name.startswith("transformer.h.0.") for name in names)


def test_a_block_of_a_family_with_a_tied_head_is_looked_at_on_the_meta_device():
    chain = chain_of(tiny_model("LT"))
    assert all(p.device.type == "meta" for p in chain.shadow.parameters())
    assert chain.calls[0].returned.device.type == "meta"


def test_homes():
    chain = chain_of(Small())
    assert chain.homes == [1, 1, 2, 3, 3, 3], "an embedding is with the next block, a head with the last that it reads"


class TestOrigins:
    """What a tensor is made of, operation by operation."""

    def setup_method(self):
        self.layer = nn.Linear(3, 3)
        self.origins = Origins(self.layer)
        self.x = self.origins.result(torch.ones(2, 3), Leaf(0, ""))
        self.y = self.origins.result(torch.ones(2, 3), Leaf(1, ""))

    def of(self, tensor):
        return self.origins.of(tensor)

    def test_results_go_through_every_operation(self):
        with self.origins:
            made = torch.cat([(self.x > 0).long().argmax(-1, keepdim=True), self.y.detach().long()], -1)
        assert self.of(made) == {Leaf(0, ""), Leaf(1, "")}

    def test_shapes_hand_nothing_on(self):
        with self.origins:
            made = torch.zeros_like(self.x) + torch.arange(self.y.shape[1]) + self.x.new_ones(3)
        assert self.of(made) == frozenset()

    def test_a_change_in_place_through_a_view(self):
        with self.origins:
            made = torch.zeros(2, 3)
            made[0].copy_(self.x[0])
            self.y[1:].mul_(2)
        assert self.of(made) == {Leaf(0, "")}
        assert self.origins.altered == {Leaf(1, "")}

    def test_a_parameter_in_glue_is_everywhere(self):
        with self.origins:
            made = self.x @ self.layer.weight
        assert self.origins.everywhere == {"weight"} and self.of(made) == {Leaf(0, "")}

    def test_inside_a_call(self):
        self.origins.call, self.origins.owned = 2, {"weight", "bias"}
        with self.origins:
            made, other = self.layer(self.x), torch.arange(3) + 1
        assert self.of(made) == {Inside(2)} and self.of(other) == frozenset()
        assert self.origins.reads[2] == {Leaf(0, "")} and not self.origins.everywhere

    def test_random_numbers(self):
        with self.origins:
            dropped = nn.functional.dropout(self.x, 0.5)
            kept = nn.functional.dropout(self.x, 0.0)
        assert self.of(dropped) == {Leaf(0, ""), Drawn(1)} and self.of(kept) == {Leaf(0, "")}

    def test_what_python_asks_for(self):
        with PythonReads(self.origins), self.origins:
            bool(self.x.sum() > 0)
            self.y.tolist()
        assert self.origins.decided == {Leaf(0, ""), Leaf(1, "")} and not self.origins.decided_at_random

    @pytest.mark.parametrize("share, random", [(0.5, True), (0.0, False)])
    def test_ways_taken_at_random(self, share, random):
        with self.origins:
            bool(torch.rand([]) < share)
        assert self.origins.decided_at_random == random

    def test_marks_of_different_kinds_differ(self):
        assert len({Inside(1), Drawn(1), Leaf(1, ""), Weight("1")}) == 4
