"""Splitting a tensor over the ranks and merging the pieces is the identity, whatever the shape and the cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from colonnade.model.layout import (
    Box,
    TensorLayout,
    deal,
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


@st.composite
def cuts(draw):
    """A logical shape and the layouts of all ranks along one of its dims: pieces, units and rank count at random."""
    ranks = draw(st.integers(1, 5))
    units = draw(st.one_of(st.none(), st.integers(1, 4)))
    blocks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))  # block size of each fused part
    sizes = [size * (units or 1) for size in blocks]
    shape = draw(st.lists(extents, min_size=0, max_size=3))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, sum(sizes))
    equal = len(set(sizes)) == 1 and draw(st.booleans())
    pieces = len(sizes) if equal else sizes
    negative = draw(st.booleans())
    layouts = [
        TensorLayout.split(
            shape, dim - len(shape) if negative else dim, shard_ranges(sum(sizes), rank, ranks, pieces, units), "tp"
        )
        for rank in range(ranks)
    ]
    return tuple(shape), dim, layouts, sizes, units


@given(cuts())
def test_splitting_and_merging_is_the_identity(cut):
    shape, _, layouts, _, _ = cut
    whole = numbered(shape)
    assert merge([(layout.extract(whole), layout) for layout in layouts]).equal(whole)


@given(cuts())
def test_every_entry_is_held_exactly_once(cut):
    shape, _, layouts, _, _ = cut
    held = torch.zeros(shape)
    for layout in layouts:
        for box in layout.boxes:
            held[box.logical_slices] += 1
    assert held.eq(1).all()


@given(cuts())
def test_a_local_tensor_has_the_shape_that_the_layout_says_and_its_own_memory(cut):
    shape, dim, layouts, _, _ = cut
    whole = numbered(shape)
    for layout in layouts:
        local = layout.extract(whole)
        assert tuple(local.shape) == layout.local_shape
        assert local.is_contiguous()
        local.fill_(-1)
    assert whole.equal(numbered(shape))
    assert sum(layout.local_shape[dim] for layout in layouts) == shape[dim]


@given(cuts())
def test_extract_gives_back_what_insert_wrote(cut):
    shape, _, layouts, _, _ = cut
    for layout in layouts:
        local = numbered(layout.local_shape)
        logical = torch.full(shape, -1.0)
        assert layout.insert(local, logical) is logical
        assert layout.extract(logical).equal(local)
        assert int(logical.ne(-1).sum()) == local.numel()


@given(cuts())
def test_indivisible_units_are_never_cut(cut):
    shape, dim, layouts, sizes, units = cut
    if units is None:
        return
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    for layout in layouts:
        for box, start, size in zip(layout.boxes, starts, sizes):
            assert (box.logical[dim] - start) % (size // units) == 0
            assert box.extent[dim] % (size // units) == 0


@given(cuts(), st.integers(0, 3))
def test_splitting_twice_by_hand_made_boxes_merges_too(cut, seed):
    """Boxes cut in two along another dim are as good as the whole ones: nothing depends on how they were made."""
    shape, _, layouts, _, _ = cut
    whole = numbered(shape)
    generator = torch.Generator().manual_seed(seed)
    pieces = []
    for layout in layouts:
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
    return Box(box.logical, box.local, first), Box(moved(box.logical, middle), moved(box.local, middle), second)


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


def test_known_ranges():
    assert shard_ranges(12, 0, 2, pieces=3) == [(0, 2), (4, 6), (8, 10)]
    assert shard_ranges(12, 1, 2, pieces=[8, 4]) == [(4, 8), (10, 12)]
    assert shard_ranges(67, 1, 2) == [(34, 67)]
    assert shard_ranges(24, 0, 2, units=3) == [(0, 16)]
    assert shard_ranges(8, 1, 2, units=1) == [(8, 8)]


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="not made of parts"):
        shard_ranges(10, 0, 2, pieces=3)
    with pytest.raises(ValueError, match="not made of parts"):
        shard_ranges(10, 0, 2, pieces=[4, 4])
    with pytest.raises(ValueError, match="equal blocks"):
        shard_ranges(10, 0, 2, units=4)


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
    layout = TensorLayout.split((4, 4), 0, [(2, 4)], "tp").named("fc.weight")
    set_layout(parameter, layout)
    assert has_layout(parameter)
    assert layout_of(parameter) is layout
    assert layout.names == ("fc.weight",)
    assert layout.sharded_axes == ("tp",)
