"""The two collectives of ZeRO: sums of parts, parts of all; any sizes, formats and numbers of ranks, and what travels."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from colonnade.cluster.mesh import Axis
from colonnade.comm.buffers import BufferPool
from colonnade.comm.collectives import gather_in_place_start, reduce_scatter_start, wait
from colonnade.comm.ledger import ledger
from colonnade.testing.ranks import on_ranks, run_on_ranks

FORMATS = [torch.float32, torch.bfloat16, torch.float16]
EVEN, UNEVEN = (5, 5, 5, 5), (3, 0, 7, 1)
NOTHING = (0, 0, 0, 0)


def values(rank, sizes, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(sum(sizes), generator=generator).to(dtype)


def part(flat, sizes, rank):
    start = sum(sizes[:rank])
    return flat[start : start + sizes[rank]]


@contextmanager
def calls_of_torch():
    """Names of torch's collectives that are called inside, and how many elements each gives away."""
    names = ("isend", "all_to_all_single", "all_reduce", "reduce_scatter_tensor", "broadcast", "all_gather_into_tensor")
    names += tuple(name for name in ("reduce_scatter_single", "all_gather_single") if hasattr(dist, name))
    seen, originals = [], {name: getattr(dist, name) for name in names}

    def spy(name):
        def call(*args, **kwargs):
            given = args[1] if name not in ("all_reduce", "broadcast", "isend") else args[0]
            seen.append((name, given.numel()))
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, spy(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def sums_of_parts(sizes, dtype, pooled):
    axis = Axis.of(None, "dp")
    sizes = sizes[: axis.size]
    of_ranks = [values(rank, sizes, dtype) for rank in range(axis.size)]
    pool = BufferPool()
    workspace = (lambda n: pool.take(n, dtype, torch.device("cpu"))) if pooled else None
    wanted = part(torch.stack(of_ranks).double().sum(0), sizes, axis.rank)
    once = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]  # half of the last digit
    bound = once * wanted.abs() + 3e-7 * part(torch.stack(of_ranks).double().abs().sum(0), sizes, axis.rank)
    sent = of_ranks[axis.rank].clone()
    with ledger() as book, calls_of_torch() as seen:
        out = torch.full((sizes[axis.rank],), 7.0, dtype=dtype)
        reduce_scatter_start(sent, sizes, axis, workspace).wait(out)
    assert ((out.double() - wanted).abs() <= bound).all(), "added up in float32 and rounded once"
    assert torch.equal(sent, of_ranks[axis.rank]), "what was sent is as it was"
    added = torch.full((sizes[axis.rank],), 2.5)
    reduce_scatter_start(sent, sizes, axis, workspace).wait(added, add=True)
    assert ((added.double() - 2.5 - wanted).abs() <= bound + 1e-6).all(), "added to what is there"
    assert book.calls == {("reduce_scatter", "dp"): 1}
    assert book.elements == {("reduce_scatter", "dp"): sum(sizes)}
    return seen


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_the_sum_of_its_part(ranks, dtype):
    for sizes, pooled in ((EVEN, False), (UNEVEN, False), (EVEN, True), (UNEVEN, True)):
        for rank, seen in enumerate(run_on_ranks(ranks, sums_of_parts, sizes, dtype, pooled)):
            others = [("isend", size) for index, size in enumerate(sizes[:ranks]) if size and index != rank]
            assert sorted(seen) == sorted(others), "each element travels once"


def of_nothing(sizes):
    axis = Axis.of(None, "dp")
    sizes = sizes[: axis.size]
    out = torch.empty(sizes[axis.rank])
    flat = torch.arange(float(sum(sizes)))
    reduce_scatter_start(flat, sizes, axis).wait(out)
    assert torch.equal(out, part(flat, sizes, axis.rank) * axis.size)
    for work in gather_in_place_start(flat, sizes, axis):
        wait(work, axis)
    assert torch.equal(flat, torch.arange(float(sum(sizes))))


@pytest.mark.parametrize("sizes", [NOTHING, (0, 4), (4, 0), (0, 0, 2)], ids=str)
def test_ranks_may_own_nothing(sizes):
    run_on_ranks(min(len(sizes), 3), of_nothing, sizes)


def test_over_one_rank_they_are_the_identity_and_count_nothing():
    axis = Axis.alone("dp")
    for flat in (torch.arange(5.0), torch.empty(0)):
        out = torch.zeros_like(flat)
        with ledger() as book:
            reduce_scatter_start(flat, (flat.numel(),), axis).wait(out)
            assert gather_in_place_start(flat, (flat.numel(),), axis) == []
        assert torch.equal(out, flat)
        assert not book.calls


@on_ranks(2)
def test_a_bfloat16_sum_is_rounded_once():
    """1 and 2⁻⁹ + 2⁻⁹: adding up in bfloat16 would lose both halves."""
    axis = Axis.of(None, "dp")
    flat = torch.full((2,), 1 + 2**-7 if axis.rank else 2**-8, dtype=torch.bfloat16)
    out = torch.zeros(1, dtype=torch.float32)
    reduce_scatter_start(flat, (1, 1), axis).wait(out)
    assert out.item() == 1 + 2**-7 + 2**-8


@on_ranks(3)
def test_a_part_may_be_a_view_of_what_was_sent():
    axis = Axis.of(None, "dp")
    flat = torch.full((9,), 10.0**axis.rank)
    own = part(flat, (3, 3, 3), axis.rank)
    reduce_scatter_start(flat, (3, 3, 3), axis).wait(own)
    assert torch.equal(own, torch.full((3,), 111.0))


def parts_of_all(sizes, dtype):
    axis = Axis.of(None, "dp")
    sizes = sizes[: axis.size]
    whole = values(99, sizes, dtype)
    flat = torch.zeros(sum(sizes) + 2, dtype=dtype)
    inside = flat[1:-1]
    part(inside, sizes, axis.rank).copy_(part(whole, sizes, axis.rank))
    with ledger() as book, calls_of_torch() as seen:
        for work in gather_in_place_start(inside, sizes, axis):
            wait(work, axis)
    assert torch.equal(inside, whole)
    assert flat[0] == flat[-1] == 0
    assert book.calls == {("all_gather", "dp"): 1}
    assert book.elements == {("all_gather", "dp"): sum(sizes)}
    return seen


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_the_parts_of_all(ranks, dtype):
    for sizes in (EVEN, UNEVEN):
        for rank, seen in enumerate(run_on_ranks(ranks, parts_of_all, sizes, dtype)):
            assert seen == [("isend", sizes[rank])] * (ranks - 1 if sizes[rank] else 0), "to each other rank once"


@on_ranks(3)
def test_many_under_way_at_a_time_do_not_mix():
    axis = Axis.of(None, "dp")
    for sizes in ((4, 4, 4), (1, 6, 2)):
        sent = [torch.full((sum(sizes),), float(10 * number + axis.rank)) for number in range(6)]
        sums = [reduce_scatter_start(flat, sizes, axis) for flat in sent]
        for number, scattered in enumerate(sums):
            out = torch.empty(sizes[axis.rank])
            scattered.wait(out)
            assert torch.equal(out, torch.full_like(out, 30.0 * number + 3))
