"""Each pair of collectives is a linear map and its adjoint: <f(x), y> = <x, f*(y)>, with replicated tensors counted once."""

from functools import partial

import pytest
import torch

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_reduce
from colonnade.comm.ledger import ledger
from colonnade.comm.regions import copy_to_region, gather_from_region, reduce_from_region, split_to_region
from colonnade.model.layout import deal
from colonnade.testing.ranks import on_ranks, run_on_ranks


def numbers(*shape, seed, rank=0):
    """The same on all ranks, or different ones where the rank is given."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64)


def inner(a, b, axis, replicated):
    """Inner product over all ranks; what every rank holds counts once."""
    product = (a * b).sum()
    return product if replicated else all_reduce(product.clone(), axis)


def assert_adjoint(function, x, y, axis, x_replicated, y_replicated):
    x.requires_grad_()
    out = function(x)
    assert out.shape == y.shape
    assert out.is_contiguous()
    out.backward(y)
    forward = inner(out.detach(), y, axis, y_replicated)
    backward = inner(x.detach(), x.grad, axis, x_replicated)
    torch.testing.assert_close(forward, backward, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_forward_and_backward_are_adjoint(world):
    run_on_ranks(world, every_pair)


def every_pair():
    axis = Axis.of(None)
    for shape, dim in (((3, 7), -1), ((3, 7), 1), ((7, 3), 0), ((2, 7, 3), 1), ((2, 7, 3), -2)):
        length = shape[dim]
        sizes = [stop - start for start, stop in deal(length, axis.size)]
        local = list(shape)
        local[dim] = sizes[axis.rank]
        same_x, same_y = numbers(*shape, seed=1), numbers(*shape, seed=2)
        own_x, own_y = numbers(*shape, seed=3, rank=axis.rank), numbers(*shape, seed=4, rank=axis.rank)
        part_x, part_y = numbers(*local, seed=5, rank=axis.rank), numbers(*local, seed=6, rank=axis.rank)

        assert_adjoint(lambda x: copy_to_region(x, axis), same_x.clone(), own_y, axis, True, False)
        assert_adjoint(lambda x: reduce_from_region(x, axis), own_x.clone(), same_y, axis, False, True)
        assert_adjoint(
            lambda x: reduce_from_region(x * 1, axis, in_place=True), own_x.clone(), same_y, axis, False, True
        )
        gather = partial(gather_from_region, axis=axis, dim=dim, sizes=sizes)
        assert_adjoint(gather, part_x.clone(), same_y, axis, False, True)
        split = partial(split_to_region, axis=axis, dim=dim, sizes=sizes)
        assert_adjoint(split, same_x.clone(), part_y, axis, True, False)


@on_ranks(3)
def test_forwards_do_what_their_names_say():
    axis = Axis.of(None)
    whole = numbers(4, 7, seed=1)
    sizes = [3, 2, 2]
    mine = whole.split(sizes, 1)[axis.rank]
    assert split_to_region(whole, axis, 1, sizes).equal(mine)
    assert gather_from_region(mine, axis, 1, sizes).equal(whole)
    assert gather_from_region(split_to_region(whole, axis, -1, sizes), axis, -1, sizes).equal(whole)
    assert copy_to_region(whole, axis) is whole
    assert reduce_from_region(torch.full((2,), float(axis.rank + 1)), axis).equal(torch.full((2,), 6.0))


@on_ranks(2)
def test_inputs_are_left_as_they_were_unless_in_place_is_asked_for():
    axis = Axis.of(None)
    x = torch.ones(3)
    assert reduce_from_region(x, axis).equal(torch.full((3,), 2.0))
    assert x.equal(torch.ones(3))
    assert reduce_from_region(x, axis, in_place=True).data_ptr() == x.data_ptr()
    strided = torch.ones(3, 2).t()
    assert reduce_from_region(strided, axis, in_place=True).equal(torch.full((2, 3), 2.0))
    assert strided.equal(torch.ones(2, 3))


@on_ranks(2)
def test_gradients_that_other_branches_share_are_not_written_to():
    """x enters the region and is also added to its output: autograd may hand one gradient tensor to both branches."""
    axis = Axis.of(None)
    x = torch.ones(3, requires_grad=True)
    y = x * 1
    reduce_from_region(copy_to_region(y, axis) * 2, axis).add(y).sum().backward()
    assert x.grad.equal(torch.full((3,), 5.0))  # 2 from each of the two ranks, 1 from the residual


@on_ranks(2)
def test_gradients_in_any_memory_layout_are_taken():
    axis = Axis.of(None)
    x = torch.ones(3, 4, requires_grad=True)
    copy_to_region(x, axis).sum().backward()  # an expanded gradient
    assert x.grad.equal(torch.full((3, 4), 2.0))
    for function in (
        lambda z: copy_to_region(z, axis),
        lambda z: split_to_region(z, axis, 1, [2, 2]).repeat(1, 2),
        lambda z: gather_from_region(z, axis, 1, [4, 4])[:, :4],
    ):
        z = torch.ones(3, 4, requires_grad=True)
        (function(z).t() * torch.arange(12.0).view(4, 3)).sum().backward()
        assert z.grad.shape == (3, 4)


@on_ranks(2)
def test_what_each_costs():
    axis = Axis.of(None)
    x = torch.ones(3, 4, requires_grad=True)
    costs = {}
    for name, function in (
        ("copy", lambda: copy_to_region(x, axis)),
        ("reduce", lambda: reduce_from_region(x, axis)),
        ("gather", lambda: gather_from_region(x, axis, 1, [4, 4])),
        ("split", lambda: split_to_region(x, axis, 1, [2, 2])),
    ):
        with ledger() as forward:
            y = function()
        with ledger() as backward:
            y.sum().backward()
        costs[name] = dict(forward.elements), dict(backward.elements)
    assert costs == {
        "copy": ({}, {("all_reduce", "tp"): 12}),
        "reduce": ({("all_reduce", "tp"): 12}, {}),
        "gather": ({("all_gather", "tp"): 24}, {}),
        "split": ({}, {("all_gather", "tp"): 12}),
    }


@on_ranks(1)
def test_over_one_rank_all_of_them_are_the_identity():
    axis = Axis.of(None)
    x = torch.ones(3, 4, requires_grad=True)
    with ledger() as book:
        assert copy_to_region(x, axis) is x
        assert reduce_from_region(x, axis) is x
        assert gather_from_region(x, axis, 1, [4]) is x
        assert split_to_region(x, axis, 1, [4]) is x
    assert not book.calls
