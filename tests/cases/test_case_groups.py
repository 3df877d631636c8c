"""FRZ-1: frozen parameters stay as they are. GRP-1: parameter groups keep their own learning rates and decay."""

import pytest
import torch
from field_cases import DATA_PARALLEL, TWO_REPLICAS, WITH_STAGES, Boosted, Trained, assert_equal_bits, whole_batch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import tiny_model

FROZEN = ("model.embed_tokens.", "model.layers.0.", "model.layers.1.")


def partly_frozen(checkpointing=False):
    model = tiny_model("LL")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def over_trainable(model):
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def over_all(model):
    return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train_partly_frozen(plugin):
    found = {}
    for checkpointing in (False, True):
        for optimizer_fn in (over_trainable, over_all):
            run = Boosted(plugin, partly_frozen(checkpointing), optimizer_fn, max_norm=1.0)
            steps = [(run.step(whole_batch()), run.optimizer.grad_norm) for _ in range(2)]
            found[checkpointing, optimizer_fn.__name__] = steps, run.weights()
    return found


@pytest.mark.parametrize("plugin, world", [*TWO_REPLICAS, ("tp2", 2), *WITH_STAGES])
def test_frozen_parameters_are_untouched(plugin, world):
    trained = Trained(partly_frozen, over_trainable, [whole_batch()] * 2, max_norm=1.0)
    one, start = trained.one, dict(partly_frozen().named_parameters())
    for found in run_on_ranks(world, train_partly_frozen, plugin):
        for case, (steps, weights) in found.items():
            assert [loss for loss, _ in steps] == pytest.approx(one.losses, abs=1e-5, rel=0), case
            assert [norm for _, norm in steps] == pytest.approx(one.norms, rel=1e-5), case
            trained.assert_weights(weights)
            frozen = {name for name in weights if name.startswith(FROZEN)}
            assert len(frozen) == 19
            assert_equal_bits({n: weights[n] for n in frozen}, {n: start[n] for n in frozen})
        for checkpointing in (False, True):
            assert_equal_bits(found[checkpointing, "over_trainable"][1], found[checkpointing, "over_all"][1])


def two_groups(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return AdamW(
        [{"params": matrices, "lr": 1e-2, "weight_decay": 0.1}, {"params": vectors, "lr": 1e-3, "weight_decay": 0.0}]
    )


def schedule(optimizer):
    return LambdaLR(optimizer, [lambda t: 0.5**t, lambda t: 1.0])


def train_two_groups(plugin):
    model = tiny_model("LL")
    optimizer = two_groups(model)
    parameters = [list(group["params"]) for group in optimizer.param_groups]
    run = Boosted(plugin, model, lambda _: optimizer, scheduler_fn=schedule)
    optimizer, scheduler, rates = run.optimizer, run.lr_scheduler, []
    for _ in range(3):
        run.step(whole_batch())
        scheduler.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    groups = zip(optimizer.param_groups, parameters)  # a pipeline stage has some of them
    same = [{id(p) for p in group["params"]} <= {id(p) for p in old} for group, old in groups]
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    return rates, same, decays, scheduler.get_last_lr(), run.weights()


@pytest.mark.parametrize("plugin, world", [*TWO_REPLICAS, ("tp2", 2), *WITH_STAGES])
def test_groups_keep_their_rates_and_decay(plugin, world):
    trained = Trained(lambda: tiny_model("LL"), two_groups, [whole_batch()] * 3, scheduler_fn=schedule)
    for rates, same, decays, last, weights in run_on_ranks(world, train_two_groups, plugin):
        assert rates == [[5e-3, 1e-3], [2.5e-3, 1e-3], [1.25e-3, 1e-3]]
        assert last == rates[-1]
        assert same == [plugin != "fsdp"] * 2, "the user's own Parameter objects, but under FSDP, which replaces them"
        assert decays == [0.1, 0.0]
        trained.assert_weights(weights)


def gradients_of_frozen(plugin):
    run = Boosted(plugin, partly_frozen(), over_all)
    run.backward(whole_batch())
    return [name for name, p in run.user.named_parameters() if not p.requires_grad and p.grad is not None]


@pytest.mark.parametrize("plugin", [*DATA_PARALLEL, "tp2", "pp2"])
def test_frozen_parameters_get_no_gradient(plugin):
    assert run_on_ranks(2, gradients_of_frozen, plugin) == [[], []]
    assert torch.is_grad_enabled()
