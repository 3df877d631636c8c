"""Pieces cover exactly what a rank holds: putting those of all ranks together is the logical tensor."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.model.layout import TensorLayout, shard_ranges
from colonnade.model.pieces import pieces_of, pieces_of_range, rectangles

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_run_is_cut_into_few_rectangles_that_are_exactly_it(shape, data):
    entries = math.prod(shape)
    start = data.draw(st.integers(0, entries))
    stop = data.draw(st.integers(start, entries))
    numbers = torch.arange(entries).view(shape)
    found = list(rectangles(shape, start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    runs = [numbers[tuple(slice(c, c + n) for c, n in zip(*each))].flatten() for each in found]
    assert torch.equal(torch.cat([*runs, torch.zeros(0, dtype=torch.long)]), torch.arange(start, stop))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
def test_parts_of_the_parts_of_all_ranks_make_up_the_whole(blocks, width, ranks, parts, fused, data):
    """Blocks dealt out to ranks, some held by several of them, and each rank's part cut anywhere."""
    pieces = 3 if fused else 1
    whole = torch.arange(blocks * width * pieces * 5).view(-1, 5)
    found = torch.full_like(whole, -1)
    for rank in range(ranks):
        ranges = shard_ranges(whole.shape[0], rank, ranks, pieces=pieces, units=blocks)
        layout = TensorLayout.split(whole.shape, 0, ranges, "tp")
        local = layout.extract(whole)
        entries = local.numel()
        cuts = sorted(data.draw(st.integers(0, entries)) for _ in range(parts - 1))
        for start, stop in zip([0, *cuts], [*cuts, entries]):
            for offset, tensor in pieces_of_range(local.flatten()[start:stop], layout, start, stop, rank):
                there = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape))
                assert (found[there] == -1).all()  # nothing twice
                found[there] = tensor
        direct = pieces_of(local, layout)
        assert all(torch.equal(t, whole[tuple(slice(o, o + n) for o, n in zip(at, t.shape))]) for at, t in direct)
    assert torch.equal(found, whole)
