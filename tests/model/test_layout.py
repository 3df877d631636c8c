"""Splitting a tensor over the ranks and merging the pieces is the identity, whatever the shape and the cut."""

from math import prod
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from colonnade.model.layout import (
    Box,
    Range,
    TensorLayout,
    deal,
    deal_blocks,
    has_layout,
    layout_of,
    merge,
    set_layout,
    shard_ranges,
)

extents = st.integers(1, 7)


def numbered(shape):
    """A tensor whose entries are all different."""
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


class Part(NamedTuple):
    """One fused part of a dimension: where it starts, its entries, its blocks, and its heads where blocks may be cut."""

    start: int
    size: int
    blocks: int
    heads: int | None


class Cut(NamedTuple):
    """A logical shape, the dim that is cut, what is fused in it, and the layouts of all ranks."""

    shape: tuple[int, ...]
    dim: int
    parts: list[Part]
    layouts: list[TensorLayout]


@st.composite
def cuts(draw):
    """A cut with parts, blocks, heads and rank count at random; also with fewer blocks, or fewer heads, than ranks."""
    ranks = draw(st.integers(1, 6))
    units = draw(st.one_of(st.none(), st.integers(1, 4)))
    parts = []
    for width in draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)):
        group = draw(st.one_of(st.none(), st.integers(1, 4))) if units else None  # heads in a block
        size = width * (units or 1) * (group or 1)
        parts.append(Part(sum(p.size for p in parts), size, units or size, group and units * group))
    sizes, heads = [p.size for p in parts], [p.heads for p in parts]
    shape = draw(st.lists(extents, min_size=0, max_size=3))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, sum(sizes))
    pieces = len(sizes) if len(set(sizes)) == 1 and draw(st.booleans()) else sizes
    counts = heads[0] if len(set(heads)) == 1 and draw(st.booleans()) else heads
    given_dim = dim - len(shape) if draw(st.booleans()) else dim
    layouts = [
        TensorLayout.split(shape, given_dim, shard_ranges(sum(sizes), rank, ranks, pieces, units, counts), "tp")
        for rank in range(ranks)
    ]
    return Cut(tuple(shape), dim, parts, layouts)


def times_held(cut):
    """How often each entry is held, and how often by the rank that counts it: the first holder, or the only one."""
    held, counted = torch.zeros(cut.shape), torch.zeros(cut.shape)
    for rank, layout in enumerate(cut.layouts):
        for box in layout.boxes:
            held[box.logical_slices] += 1
            counted[box.logical_slices] += not box.holders or box.holders[0] == rank
    return held, counted


@given(cuts())
def test_splitting_and_merging_is_the_identity(cut):
    whole = numbered(cut.shape)
    assert merge([(layout.extract(whole), layout) for layout in cut.layouts]).equal(whole)


@given(cuts())
def test_every_entry_is_held_and_counted_by_exactly_one_rank(cut):
    held, counted = times_held(cut)
    assert held.ge(1).all()
    assert counted.eq(1).all()


@given(cuts())
def test_an_entry_is_held_by_several_ranks_only_where_its_box_names_them(cut):
    held, _ = times_held(cut)
    for rank, layout in enumerate(cut.layouts):
        for box in layout.boxes:
            assert held[box.logical_slices].eq(len(box.holders) or 1).all()
            assert not box.holders or rank in box.holders


@given(cuts())
def test_all_holders_of_a_box_hold_the_same(cut):
    for layout in cut.layouts:
        for box in layout.boxes:
            for holder in box.holders:
                found = {(b.logical, b.extent, b.holders) for b in cut.layouts[holder].boxes}
                assert (box.logical, box.extent, box.holders) in found


@given(cuts())
def test_a_local_tensor_has_the_shape_that_the_layout_says_and_its_own_memory(cut):
    whole = numbered(cut.shape)
    for layout in cut.layouts:
        local = layout.extract(whole)
        assert tuple(local.shape) == layout.local_shape
        assert local.numel() == sum(prod(box.extent) for box in layout.boxes)
        assert local.is_contiguous()
        local.fill_(-1)
    assert whole.equal(numbered(cut.shape))


@given(cuts())
def test_extract_gives_back_what_insert_wrote(cut):
    for layout in cut.layouts:
        local = numbered(layout.local_shape)
        logical = torch.full(cut.shape, -1.0)
        assert layout.insert(local, logical) is logical
        assert layout.extract(logical).equal(local)
        assert int(logical.ne(-1).sum()) == local.numel()


@given(cuts())
def test_heads_are_never_cut_and_blocks_only_where_there_are_fewer_than_ranks(cut):
    for layout in cut.layouts:
        for box, part in zip(layout.boxes, cut.parts):
            scarce = part.blocks < len(cut.layouts)
            grain = part.size // (part.heads if scarce and part.heads else part.blocks)
            assert (box.logical[cut.dim] - part.start) % grain == 0
            assert box.extent[cut.dim] % grain == 0


@given(cuts())
def test_shares_are_as_even_as_blocks_and_heads_allow(cut):
    ranks = len(cut.layouts)
    for index, part in enumerate(cut.parts):
        shares = [layout.boxes[index].extent[cut.dim] for layout in cut.layouts]
        block = part.size // part.blocks
        if part.blocks >= ranks:
            assert max(shares) - min(shares) <= block
            continue
        for first, last in deal(ranks, part.blocks):
            sharing = shares[first:last]
            if part.heads in (None, part.blocks):
                assert sharing == [block] * len(sharing)
            else:
                assert sum(sharing) == block
                assert max(sharing) - min(sharing) <= part.size // part.heads


@given(cuts(), st.integers(0, 3))
def test_splitting_twice_by_hand_made_boxes_merges_too(cut, seed):
    """Boxes cut in two along another dim are as good as the whole ones: nothing depends on how they were made."""
    whole = numbered(cut.shape)
    generator = torch.Generator().manual_seed(seed)
    pieces = []
    for layout in cut.layouts:
        boxes = tuple(half for box in layout.boxes for half in halves(box, generator))
        finer = TensorLayout(layout.shape, boxes, layout.sharded_axes)
        assert finer.local_shape == layout.local_shape
        pieces.append((finer.extract(whole), finer))
    assert merge(pieces).equal(whole)


def halves(box, generator):
    dim = int(torch.randint(0, len(box.extent), (), generator=generator))
    middle = int(torch.randint(0, box.extent[dim] + 1, (), generator=generator))

    def moved(corner, by):
        return tuple(x + by * (i == dim) for i, x in enumerate(corner))

    first = tuple(middle if i == dim else n for i, n in enumerate(box.extent))
    second = tuple(n - middle if i == dim else n for i, n in enumerate(box.extent))
    return (
        Box(box.logical, box.local, first, box.holders),
        Box(moved(box.logical, middle), moved(box.local, middle), second, box.holders),
    )


@given(st.integers(0, 100), st.integers(1, 20))
def test_dealing_covers_everything_in_order_and_evenly(units, ranks):
    shares = deal(units, ranks)
    assert len(shares) == ranks
    assert shares[0][0] == 0
    assert shares[-1][1] == units
    assert all(stop == start for (_, stop), (start, _) in zip(shares, shares[1:]))
    sizes = [stop - start for start, stop in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 20), st.integers(1, 12), st.integers(1, 6))
def test_query_heads_are_dealt_to_ranks_that_hold_the_keys_they_read(blocks, ranks, parts):
    """Key/value heads in blocks of one, query heads `parts` to each of them; and each key is read equally often."""
    keys, queries = deal_blocks(blocks, ranks), deal_blocks(blocks, ranks, parts)
    assert len(keys) == len(queries) == ranks
    for key, query in zip(keys, queries):
        assert key.size >= 1
        assert key.start * parts <= query.start <= query.stop <= key.stop * parts
        assert query.size % key.size == 0
        if blocks >= ranks:
            assert query.size // key.size == parts and not key.holders
    for rank, key in enumerate(keys):
        assert key.holders == () or key.holders == tuple(r for r in range(ranks) if keys[r].start == key.start)
        assert key.holders == () or rank in key.holders


@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 6))
def test_query_heads_are_dealt_out_once_each_in_order(blocks, ranks, parts):
    queries = deal_blocks(blocks, ranks, parts)
    if not any(query.holders for query in queries):
        assert [head for query in queries for head in range(query.start, query.stop)] == list(range(blocks * parts))
    else:
        assert parts == 1 and blocks < ranks


def test_known_ranges():
    assert shard_ranges(12, 0, 2, pieces=3) == [Range(0, 2), Range(4, 6), Range(8, 10)]
    assert shard_ranges(12, 1, 2, pieces=[8, 4]) == [Range(4, 8), Range(10, 12)]
    assert shard_ranges(67, 1, 2) == [Range(34, 67)]
    assert shard_ranges(24, 0, 2, units=3) == [Range(0, 16)]


def test_known_ranges_with_fewer_blocks_than_ranks():
    held = [shard_ranges(8, rank, 2, units=1) for rank in range(2)]
    assert held == [[Range(0, 8, (0, 1))], [Range(0, 8, (0, 1))]]
    # two key/value heads of 4 entries on three ranks: the first on two of them
    held = [shard_ranges(8, rank, 3, units=2) for rank in range(3)]
    assert held == [[Range(0, 4, (0, 1))], [Range(0, 4, (0, 1))], [Range(4, 8, (2,))]]
    # six query heads of 4 entries, three for each of these
    held = [shard_ranges(24, rank, 3, units=2, heads=6) for rank in range(3)]
    assert held == [[Range(0, 8)], [Range(8, 12)], [Range(12, 24)]]


def test_known_ranges_of_a_fused_part_with_heads_of_its_own():
    """[q|k|v] with four query heads and one key/value head, all of 2 entries."""
    held = [shard_ranges(12, rank, 2, pieces=[8, 2, 2], units=1, heads=[4, None, None]) for rank in range(2)]
    assert held[0] == [Range(0, 4), Range(8, 10, (0, 1)), Range(10, 12, (0, 1))]
    assert held[1] == [Range(4, 8), Range(8, 10, (0, 1)), Range(10, 12, (0, 1))]
    layout = TensorLayout.split((12,), 0, held[1], "tp")
    assert layout.local_shape == (8,)
    assert layout.extract(torch.arange(12)).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert [box.holders for box in layout.boxes] == [(), (0, 1), (0, 1)]


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="not made of parts"):
        shard_ranges(10, 0, 2, pieces=3)
    with pytest.raises(ValueError, match="not made of parts"):
        shard_ranges(10, 0, 2, pieces=[4, 4])
    with pytest.raises(ValueError, match="equal blocks"):
        shard_ranges(10, 0, 2, units=4)
    with pytest.raises(ValueError, match="equal blocks of whole heads"):
        shard_ranges(12, 0, 2, units=4, heads=6)
    with pytest.raises(ValueError, match="counts of heads"):
        shard_ranges(12, 0, 2, pieces=3, units=1, heads=[4, None])


@given(st.lists(extents, min_size=0, max_size=4))
def test_a_tensor_without_a_layout_is_whole(shape):
    tensor = numbered(shape)
    assert not has_layout(tensor)
    layout = layout_of(tensor)
    assert layout.shape == layout.local_shape == tuple(shape)
    assert layout.extract(tensor).equal(tensor)
    assert merge([(tensor, layout)]).equal(tensor)
    assert layout.sharded_axes == ()


def test_a_layout_rides_on_a_parameter():
    parameter = nn.Parameter(torch.zeros(2, 4))
    layout = TensorLayout.split((4, 4), 0, [Range(2, 4)], "tp").named("fc.weight")
    set_layout(parameter, layout)
    assert has_layout(parameter)
    assert layout_of(parameter) is layout
    assert layout.names == ("fc.weight",)
    assert layout.sharded_axes == ("tp",)
