"""ParallelOptimizer passes for the optimizer it wraps: hooks, attributes, groups; it cannot be copied. Fused steps."""

import copy
import pickle

import pytest
import torch
from engines import Run, batch, sgd, small

from colonnade.errors import UsageError
from colonnade.precision.fused import prefer_fused
from colonnade.precision.loss_scale import LossScale
from colonnade.testing.ranks import on_ranks, run_on_ranks

ENGINES = ["ddp 2", "tp 2", "zero 1", "fsdp 2"]


def run_of(engine, precision="fp16"):
    return Run(engine, small(), sgd, precision=precision, loss_scale=LossScale(initial=256))


def step(run):
    run.optimizer.zero_grad()
    run.backward(batch(1))
    run.optimizer.step()


@on_ranks(2)
def test_hooks_of_the_optimizer_run_when_it_steps():
    for engine in ENGINES:
        run, calls = run_of(engine), []
        run.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs, calls=calls: calls.append("before"))
        handle = run.optimizer.register_step_post_hook(
            lambda optimizer, args, kwargs, calls=calls: calls.append("after")
        )
        run.optimizer.register_state_dict_pre_hook(lambda optimizer, calls=calls: calls.append("state"))
        step(run)
        assert calls == ["before", "after"]
        run.backward(batch(1), float("inf"))
        run.optimizer.step()
        assert calls == ["before", "after"], "a step that is left out is no step"
        handle.remove()
        step(run)
        run.optimizer.state_dict()
        assert calls == ["before", "after", "before", "state"]


@on_ranks(2)
def test_attributes_of_the_optimizer_can_be_reached():
    run = run_of("ddp 2")
    run.inner.note = "mine"
    assert run.optimizer.note == "mine"
    assert run.optimizer.defaults is run.inner.defaults
    assert run.optimizer.param_groups is run.inner.param_groups
    assert not hasattr(run.optimizer, "no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = run.optimizer.no_such_thing


@on_ranks(2)
def test_it_cannot_be_copied_and_the_attempt_breaks_nothing():
    for engine in ENGINES:
        run = run_of(engine)
        step(run)
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(UsageError, match=r"cannot be copied or pickled(.|\n)*state_dict"):
                attempt(run.optimizer)
        step(run)
        assert run.optimizer.loss_scaler.skipped == 0


@on_ranks(2)
def test_the_groups_hold_the_users_parameters_after_every_kind_of_step():
    for engine in ENGINES:
        run = run_of(engine)
        own = [p for group in run.optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in own} == {id(p) for p in run.model.unwrap().parameters()}
        step(run)
        run.backward(batch(1), float("nan"))
        run.optimizer.step()  # left out
        run.optimizer.zero_grad()
        run.model(**run.share(batch(1))).loss.backward()
        with pytest.raises(UsageError):
            run.optimizer.step()  # refused
        found = [p for group in run.optimizer.param_groups for p in group["params"]]
        assert len(found) == len(own) and all(a is b for a, b in zip(found, own))


@on_ranks(2)
def test_a_group_added_to_masters_after_boost_is_unscaled_too():
    """Hybrid and DDP over one data-parallel rank: nothing has to average its gradients."""
    run = run_of("tp 2")
    late = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, dtype=torch.float16))]
    run.optimizer.add_param_group({"params": late, "lr": 0.5, "momentum": 0.0})
    loss = run.model(**run.share(batch(1))).loss + sum(p.sum() for p in late) * 0.25
    run.booster.backward(loss, run.optimizer)
    run.optimizer.step()
    assert all(p.tolist() == [0.875] * 3 for p in late)
    assert [p.dtype for p in late] == [torch.float32, torch.float16]


def test_the_fused_step_is_chosen_only_where_the_user_left_it_open_and_it_works():
    def chosen(kind, **options):
        optimizer = kind([torch.nn.Parameter(torch.ones(2))], **{"lr": 0.1} | options)
        prefer_fused(optimizer)
        return optimizer.param_groups[0]["fused"]

    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad):
        assert chosen(kind) is True
        assert chosen(kind, fused=False) is False
        assert not chosen(kind, foreach=False) and not chosen(kind, foreach=True)
        assert not chosen(kind, differentiable=True)
    assert not chosen(torch.optim.AdamW, lr=torch.tensor(0.1))
    assert not chosen(torch.optim.SGD, momentum=0.9), "its kernel wants a momentum of all tensors or of none"
    assert not chosen(type("Mine", (torch.optim.AdamW,), {}))


def reload(folder):
    """Loading the very weights that the model has: what is stepped on must not keep digits that the files do not have."""
    for engine in ("ddp 2", "tp 2", "zero 1", "zero 2, small buckets"):
        run = run_of(engine, "bf16")
        step(run)
        run.booster.save_model(run.model, folder / engine)
        for loaded in (False, True):
            if loaded:
                run.booster.load_model(run.model, folder / engine)
            with run.optimizer.stepped.swapped():
                stepped = [p.detach() for group in run.optimizer.param_groups for p in group["params"]]
            assert {p.dtype for p in stepped} == {torch.float32}
            assert all(p.equal(p.bfloat16().float()) for p in stepped) == loaded


def test_loading_leaves_nothing_of_the_former_master_weights(tmp_path):
    run_on_ranks(2, reload, tmp_path)
