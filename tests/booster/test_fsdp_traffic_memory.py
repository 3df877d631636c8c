"""TorchFSDPPlugin: what travels and what a rank holds, counted exactly against the budgets of sharded data parallelism.

Ψ parameters on N ranks: 3Ψ elements a step, 2Ψ where parameters stay gathered, and 16Ψ/N bytes in fp32. To this comes the
padding: each parameter travels, and lies in memory, in N equal chunks of ceil(rows / N) rows.
"""

import gc
from math import prod

import pytest
import torch
import torch.distributed as dist
from parity_runs import build, rows
from torch.optim import AdamW

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import TorchFSDPPlugin
from colonnade.fsdp import comms
from colonnade.model.layout import layout_of, local_of
from colonnade.testing.parity import rows_of
from colonnade.testing.ranks import on_ranks, run_on_ranks

BLOCKS = 2


def padded(model, ranks):
    """Elements of the padded chunks of all ranks, of the blocks and of the rest."""
    blocks = {p for block in model.model.layers for p in block.parameters()}
    sizes = {p: -(-p.shape[0] // ranks) * ranks * prod(p.shape[1:]) for p in model.parameters()}
    inside = sum(size for p, size in sizes.items() if p in blocks)
    return inside, sum(sizes.values()) - inside


def boosted(name="LL", precision="fp32", overrides=None, **options):
    model = build(name, **(overrides or {}))
    booster = Booster(plugin=TorchFSDPPlugin(precision=precision, **options))
    model, optimizer, *_ = booster.boost(model, AdamW(model.parameters(), lr=1e-3))
    return booster, model, optimizer


def backward(booster, model, optimizer, count=1, no_sync=False):
    whole = {k: ids.clamp(max=63) for k, ids in rows(dist.get_world_size())[0].items()}
    batch = rows_of(whole, dist.get_rank(), dist.get_world_size())
    for index in range(count):
        if no_sync and index + 1 < count:
            with booster.no_sync(model, optimizer):
                booster.backward(model(**batch).loss, optimizer)
        else:
            booster.backward(model(**batch).loss, optimizer)


def count_step(name, overrides, options, backwards=1, no_sync=False):
    """A step's ledger, less the exchanges of single numbers, and the padded sizes."""
    booster, model, optimizer = boosted(name, overrides=overrides, **options)
    backward(booster, model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    with colonnade.ledger() as ledger:
        backward(booster, model, optimizer, backwards, no_sync)
        optimizer.step()
    ranks = dist.get_world_size()
    synced = 1 if no_sync else backwards
    # the loss and its number of targets; whether a parameter was unused; squares of the norm: whole and split
    small = {"calls": backwards + synced + 1, "elements": ranks * (2 * backwards + synced + 2)}
    found = dict(ledger.elements)
    calls = dict(ledger.calls)
    found["all_gather", "dp"] -= small["elements"]
    calls["all_gather", "dp"] -= small["calls"]
    return (
        found,
        calls,
        padded(build(name, **overrides), ranks),
        sum(p.numel() for p in build(name, **overrides).parameters()),
    )


EVEN = {"vocab_size": 64}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_moves_three_times_the_parameters(ranks):
    for found, calls, _, size in run_on_ranks(ranks, count_step, "LL", EVEN, {}):
        assert found == {("all_gather", "dp"): 2 * size, ("reduce_scatter", "dp"): size}
        assert calls == {("all_gather", "dp"): 2 * (BLOCKS + 1), ("reduce_scatter", "dp"): BLOCKS + 1}


@pytest.mark.parametrize("name", ["LL", "LT"])
def test_where_rows_do_not_divide_the_padding_travels_too(name):
    for found, _, (blocks, rest), size in run_on_ranks(3, count_step, name, {}, {}):
        assert size < blocks + rest < 1.1 * size
        assert found == {("all_gather", "dp"): 2 * (blocks + rest), ("reduce_scatter", "dp"): blocks + rest}


def test_parameters_that_stay_are_gathered_once():
    for found, _, _, size in run_on_ranks(2, count_step, "LL", EVEN, {"reshard_after_forward": False}):
        assert found == {("all_gather", "dp"): size, ("reduce_scatter", "dp"): size}


def test_only_the_blocks_are_gathered_again_where_the_rest_stays():
    for found, _, (blocks, rest), size in run_on_ranks(2, count_step, "LL", EVEN, {"reshard_after_forward": None}):
        assert found == {("all_gather", "dp"): 2 * blocks + rest, ("reduce_scatter", "dp"): size}


def test_accumulation_with_and_without_no_sync():
    for found, *_, size in run_on_ranks(2, count_step, "LL", EVEN, {}, 3):
        assert found == {("all_gather", "dp"): 6 * size, ("reduce_scatter", "dp"): 3 * size}
    for found, *_, size in run_on_ranks(2, count_step, "LL", EVEN, {}, 3, no_sync=True):
        assert found == {("all_gather", "dp"): 6 * size, ("reduce_scatter", "dp"): size}


def storage(tensors):
    """Bytes of memory behind tensors, each piece once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def held(precision):
    ranks = dist.get_world_size()
    _booster, model, optimizer = boosted("LL", precision)
    backward(_booster, model, optimizer)
    optimizer.step()
    params = list(model.unwrap().parameters())
    share = sum(padded(build("LL"), ranks)) // ranks
    assert all(p.dtype is local_of(p.grad).dtype is torch.float32 for p in params)
    assert storage([local_of(p.detach()) for p in params]) == 4 * share
    assert storage([local_of(p.grad) for p in params]) == 4 * share
    for param in params:
        own = local_of(param.detach())
        assert tuple(own.shape) == layout_of(param).local_shape
        for moment in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[param][moment]
            assert type(state) is torch.Tensor
            assert state.dtype is torch.float32
            assert state.untyped_storage().nbytes() == 4 * own.numel()
    return share, sum(local_of(p.detach()).numel() for p in params), sum(p.numel() for p in build("LL").parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_holds_sixteen_bytes_for_its_share_of_the_parameters(ranks, precision):
    results = run_on_ranks(ranks, held, precision)
    size = results[0][2]
    assert sum(own for _, own, _ in results) == size, "every entry is on one rank"
    assert all(share < 1.1 * size / ranks for share, *_ in results)


def tensors_alive():
    gc.collect()
    return [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.device.type == "cpu"]


@on_ranks(2)
def test_nothing_whole_is_left_after_a_step():
    before = tensors_alive()
    booster, model, optimizer = boosted("LL", overrides={"hidden_size": 64, "vocab_size": 512})
    size = sum(p.numel() for p in model.unwrap().parameters())
    backward(booster, model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    earlier = {id(tensor) for tensor in before}
    made = [tensor for tensor in tensors_alive() if id(tensor) not in earlier]
    assert storage([local_of(tensor.detach()) for tensor in made]) <= 12 * size / 2 * 1.05


@on_ranks(2)
def test_the_bf16_parameters_travel_in_bf16_and_gradients_in_the_format_asked_for():
    seen = []
    original = comms.reduce_scatter_start

    def spy(flat, *args, **kwargs):
        seen.append(flat.dtype)
        return original(flat, *args, **kwargs)

    comms.reduce_scatter_start = spy
    try:
        for asked, wanted in ((None, torch.bfloat16), ("fp32", torch.float32)):
            seen.clear()
            backward(*boosted("LL", "bf16", reduce_dtype=asked))
            assert set(seen) == {wanted}
    finally:
        comms.reduce_scatter_start = original
