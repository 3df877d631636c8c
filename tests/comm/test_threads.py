"""Ranks as threads: the same collectives, the same bits on every rank, and nobody left waiting."""

import copy
import time

import pytest
import torch

import colonnade
from colonnade.comm.collectives import all_gather, all_gather_dim, all_gather_object, all_reduce, all_reduce_async, wait
from colonnade.comm.threads import run_as_ranks
from colonnade.errors import CommunicationError
from colonnade.shardformer import ShardConfig, ShardFormer
from colonnade.testing.tiny import ids, tiny_model


def test_collectives_between_threads():
    def work(axis):
        mine = torch.full((2,), float(axis.rank + 1))
        work = all_reduce_async(other := mine.clone(), axis)
        wait(work, axis)
        joined = all_gather_dim(torch.arange(axis.rank + 1), axis, 0, [1, 2, 3])
        everyone = [t.tolist() for t in all_gather(mine, axis)]
        return (
            all_reduce(mine.clone(), axis).tolist(),
            other.tolist(),
            joined.tolist(),
            everyone,
            all_gather_object(axis.rank, axis),
        )

    for found in run_as_ranks(3, work):
        assert found == ([6.0, 6.0], [6.0, 6.0], [0, 0, 1, 0, 1, 2], [[1.0] * 2, [2.0] * 2, [3.0] * 2], [0, 1, 2])


def test_a_split_model_gives_the_gradients_of_one_process():
    model, x = tiny_model("LL").double(), ids(2, 12)
    copies = [copy.deepcopy(model) for _ in range(4)]
    model(input_ids=x, labels=x).loss.backward()

    def work(axis):
        split, _ = ShardFormer(ShardConfig(axis)).optimize(copies[axis.rank])
        split(input_ids=x, labels=x).loss.backward()
        return {name: (p.tensor_layout, p.grad) for name, p in split.named_parameters() if hasattr(p, "tensor_layout")}

    wanted = {name: p.grad for name, p in model.named_parameters()}
    with colonnade.ledger() as ledger:
        found = run_as_ranks(4, work)
    assert not ledger.calls, "what threads tell each other is no traffic"
    for of_rank in found:
        assert of_rank
        for name, (layout, grad) in of_rank.items():
            assert torch.allclose(grad, layout.extract(wanted[name]), rtol=1e-5, atol=1e-7), name


def test_the_error_of_the_rank_that_failed_is_raised_and_the_others_do_not_wait():
    def work(axis):
        if axis.rank == 1:
            raise KeyError("mine")
        all_reduce(torch.ones(2), axis)

    started = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        run_as_ranks(3, work)
    assert time.monotonic() - started < 5


def test_ranks_that_make_different_calls_are_told():
    def shapes(axis):
        all_reduce(torch.ones(2 + axis.rank), axis)

    def one_more(axis):
        if axis.rank == 0:
            all_reduce(torch.ones(2), axis)

    for work in (shapes, one_more):
        with pytest.raises(CommunicationError, match="ranks made different calls: .*all_reduce of"):
            run_as_ranks(2, work)
