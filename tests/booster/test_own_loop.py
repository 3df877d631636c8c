"""Habits people bring along from plain PyTorch: right, or refused; never silently wrong."""

import copy

import pytest
import torch

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.comm.collectives import all_gather_object
from colonnade.errors import UsageError
from colonnade.testing.ranks import on_ranks
from colonnade.testing.tiny import ids, tiny_model


def boosted(tp, name="LL", **options):
    booster = Booster(plugin=HybridParallelPlugin(tp_size=tp, precision="fp32", **options))
    model = tiny_model(name)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return booster, model, optimizer


def share(booster, batch):
    rows = len(batch) // booster.plugin.mesh.size("dp")
    start = booster.plugin.mesh.rank("dp") * rows
    mine = batch[start : start + rows]
    return {"input_ids": mine, "labels": mine}


@pytest.mark.parametrize("twice", [False, True])
@on_ranks(2)
def test_a_plain_backward_is_reduced_too(twice):
    weights = []
    for through_booster in (True, False):
        booster, model, optimizer = boosted(1)
        for step in range(2):
            for seed in (7 + step, 9 + step)[: 1 + twice]:
                loss = model(**share(booster, ids(4, 16, seed=seed))).loss
                if through_booster:
                    booster.backward(loss, optimizer)
                else:
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert weights[0].equal(weights[1])
    assert all(w.equal(weights[0]) for w in all_gather_object(weights[1], booster.plugin.mesh.world))


@on_ranks(2)
def test_clipping_by_the_norm_of_a_shard_is_noticed():
    booster, model, optimizer = boosted(2)
    booster.backward(model(**share(booster, ids(4, 16))).loss, optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with pytest.raises(UsageError, match="max_norm instead of torch.nn.utils.clip_grad_norm_"):
        optimizer.step()


@on_ranks(2)
def test_saving_a_split_model_by_its_own_method_is_refused():
    _, model, _ = boosted(2)
    for save in (model.save_pretrained, model.unwrap().save_pretrained):
        with pytest.raises(UsageError, match="booster.save_model"):
            save("anywhere")


@on_ranks(2)
def test_micro_batches_gather_no_logits():
    booster, model, optimizer = boosted(2, microbatch_size=2)
    batch = share(booster, ids(4, 16))
    with colonnade.ledger() as ledger:
        booster.execute_pipeline(iter([batch]), model, None, optimizer)
    rows, vocabulary = 2 * 16, 64
    assert ledger.elements["all_gather", "tp"] < 2 * rows * vocabulary / 4
    output = model(**batch)
    with colonnade.ledger() as ledger:
        assert output["loss"] is output.loss and output.get("loss") is output.loss
    assert not ledger.calls and output["logits"].shape[-1] == vocabulary


@on_ranks(2)
def test_a_graph_from_before_boost_may_be_alive():
    model = tiny_model("G2")
    before = model(input_ids=ids(2, 8), labels=ids(2, 8)).loss
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32"))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(input_ids=ids(2, 8), labels=ids(2, 8)).loss
    booster.backward(loss, optimizer)
    optimizer.step()
    torch.testing.assert_close(loss, before)


@on_ranks(2)
def test_what_cannot_work_says_what_to_do():
    booster, model, optimizer = boosted(2)
    with pytest.raises(UsageError, match="hold labels"):
        booster.backward(model(input_ids=ids(2, 8)).loss, optimizer)
    with pytest.raises(UsageError, match="before boost"):
        copy.deepcopy(model)
