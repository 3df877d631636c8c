"""TIE-1, NORM-2, ACC-2, AVG-1 and AVG-2 over pipeline stages: one tied weight, one norm, one mean, however it is cut."""

import pytest
import torch
from field_cases import (
    GRADIENT,
    IGNORED,
    LOSS,
    Boosted,
    Single,
    Trained,
    adamw,
    assert_close,
    norm_of,
    sgd,
    whole_batch,
)

from colonnade.comm.collectives import all_gather_object
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

EMBEDDING = "model.embed_tokens.weight"


def copies_of_the_tied_weight(run):
    """The tied weight as each rank of the world holds it, under whichever of its names; None where it is not held."""
    held = dict(run.user.named_parameters(remove_duplicate=False))
    mine = next((held[name].detach() for name in (EMBEDDING, "lm_head.weight") if name in held), None)
    return all_gather_object(mine, run.plugin.mesh.world)


def tied_gradients(plugin, micro):
    run = Boosted(plugin, tiny_model("LT"), microbatch_size=micro)
    loss = run.pipeline(whole_batch())
    return loss, run.gradients_by_step()


@pytest.mark.parametrize("plugin, world, micro", [("pp2", 2, 2), ("pp2", 2, 1), ("pp4", 4, 2)])
def test_a_tied_weight_gets_the_gradients_of_both_its_stages(plugin, world, micro):
    one = Single(tiny_model("LT")).step(whole_batch())
    for loss, gradients in run_on_ranks(world, tied_gradients, plugin, micro):
        assert loss == pytest.approx(one.losses[0], abs=LOSS)
        assert gradients[EMBEDDING].norm().item() == pytest.approx(2.173064, rel=1e-5)
        assert_close(gradients, one.gradients, GRADIENT)


def tied_training(plugin):
    run = Boosted(plugin, tiny_model("LT"), adamw, microbatch_size=2)
    held, losses = [copies_of_the_tied_weight(run)], []
    for _ in range(3):
        losses.append(run.step(whole_batch()))
        held.append(copies_of_the_tied_weight(run))
    entries = sum(len(group["params"]) for group in run.optimizer.param_groups)
    return losses, held, run.weights(), entries


@pytest.mark.parametrize("plugin, world", [("pp2", 2), ("pp4", 4), ("pp2, zero 1", 4)])
def test_the_copies_of_a_tied_weight_stay_equal(plugin, world):
    trained = Trained(lambda: tiny_model("LT"), adamw, [whole_batch()] * 3)
    answers = run_on_ranks(world, tied_training, plugin)
    for losses, held, weights, _ in answers:
        assert losses == pytest.approx(trained.one.losses, abs=LOSS, rel=0)
        for of_ranks in held:
            copies = [weight for weight in of_ranks if weight is not None]
            assert len(copies) == (2 if world == 2 or plugin == "pp4" else 4)
            assert all(torch.equal(copy, copies[0]) for copy in copies)
        trained.assert_weights(weights)
    if plugin != "pp2, zero 1":
        assert sum(entries for *_, entries in answers) == 38, "the copy is no parameter of any optimizer"


def clipped_step(plugin):
    run = Boosted(plugin, tiny_model("LT"), max_norm=1.0, num_microbatches=2)
    run.pipeline(whole_batch())
    update = run.gradients_by_step()
    return run.optimizer.grad_norm, update


@pytest.mark.parametrize("plugin, world", [("pp2, tp2", 4), ("pp2, zero 1", 4), ("pp2", 2), ("pp2", 4), ("pp4", 4)])
def test_the_norm_over_stages_counts_a_tied_weight_once(plugin, world):
    one = Single(tiny_model("LT")).step(whole_batch())
    assert one.norms[0] == pytest.approx(4.478679, rel=1e-6)
    for norm, update in run_on_ranks(world, clipped_step, plugin):
        assert norm == pytest.approx(4.478679, rel=1e-5)
        assert norm_of(update) == pytest.approx(1.0, abs=1e-5)
        assert_close(update, {name: g / one.norms[0] for name, g in one.gradients.items()}, GRADIENT)


def half(outputs, inputs):
    return outputs.loss / 2


def accumulated(plugin, no_sync):
    """By size of the micro-batches: the losses of two calls, and the gradients of both together."""
    found = {}
    for micro in (1, 2, 3):
        run = Boosted(plugin, tiny_model("LL"), microbatch_size=micro)
        if no_sync:
            with run.booster.no_sync(run.model, run.optimizer):
                losses = [run.pipeline(whole_batch(seed=7), half)]
        else:
            losses = [run.pipeline(whole_batch(seed=7), half)]
        losses.append(run.pipeline(whole_batch(seed=8), half))
        found[micro] = losses, run.gradients_by_step()
    return found


@pytest.mark.parametrize("no_sync", [False, True], ids=["plain", "no_sync"])
@pytest.mark.parametrize("plugin, world", [("pp2", 2), ("pp2", 4), ("pp2, zero 1", 4)])
def test_accumulated_calls_are_not_scaled_again(plugin, world, no_sync):
    """Of two batches, the mean by a criterion that halves the loss."""
    wanted = [Single(tiny_model("LL")).step(whole_batch(seed=seed)) for seed in (7, 8)]
    gradients = {name: (g + wanted[1].gradients[name]) / 2 for name, g in wanted[0].gradients.items()}
    for found in run_on_ranks(world, accumulated, plugin, no_sync):
        for losses, accumulated_gradients in found.values():
            assert losses == pytest.approx([one.losses[0] / 2 for one in wanted], abs=LOSS, rel=0)
            assert_close(accumulated_gradients, gradients, GRADIENT)


def only_inside_no_sync(plugin):
    """Every call inside no_sync, so that `step` itself has to bring the gradients together."""
    run = Boosted(plugin, tiny_model("LT"), microbatch_size=1)
    with run.booster.no_sync(run.model, run.optimizer):
        for seed in (7, 8):
            run.pipeline(whole_batch(seed=seed), half)
    return run.gradients_by_step()


@pytest.mark.parametrize("plugin, world", [("pp2", 2), ("pp2", 4), ("pp2, zero 1", 4)])
def test_a_step_after_calls_inside_no_sync_alone(plugin, world):
    one = Single(tiny_model("LT")).step(whole_batch(seed=7), whole_batch(seed=8))
    for gradients in run_on_ranks(world, only_inside_no_sync, plugin):
        assert_close(gradients, one.gradients, GRADIENT)


def forgotten(plugin):
    """A call whose gradients are dropped, then another."""
    run = Boosted(plugin, tiny_model("LT"), microbatch_size=1)
    run.pipeline(whole_batch(seed=20))
    run.optimizer.zero_grad()
    with run.booster.no_sync(run.model, run.optimizer):
        run.pipeline(whole_batch(seed=21))
    run.model.zero_grad()
    run.pipeline(whole_batch())
    return run.gradients_by_step()


@pytest.mark.parametrize("plugin, world", [("pp2", 2), ("pp2, zero 1", 4)])
def test_zero_grad_forgets_on_every_stage(plugin, world):
    one = Single(tiny_model("LT")).step(whole_batch())
    for gradients in run_on_ranks(world, forgotten, plugin):
        assert_close(gradients, one.gradients, GRADIENT)


def gappy_batch():
    """3, 0, 15 and 15 targets."""
    batch = whole_batch()
    batch["labels"][0, 4:] = IGNORED
    batch["labels"][1] = IGNORED
    return batch


def unequal_batch():
    """6 targets in the first two rows, 30 in the last two."""
    batch = whole_batch()
    batch["labels"][:2, 4:] = IGNORED
    return batch


def one_by_one(plugin, batch, given):
    """By size of the micro-batches: loss, norm and gradients."""
    found = {}
    for micro in (1, 2, 4):
        run = Boosted(plugin, tiny_model("LL"), microbatch_size=micro)
        loss = run.pipeline(batch | given)
        gradients = run.gradients_by_step()
        found[micro] = loss, run.optimizer.grad_norm, gradients
    return found


@pytest.mark.parametrize("plugin, world", [("pp2", 2), ("pp2", 4), ("pp4", 4), ("pp2, zero 1", 4), ("pp2, tp2", 4)])
def test_a_micro_batch_without_targets_weighs_nothing(plugin, world):
    one = Single(tiny_model("LL")).step(gappy_batch())
    for found in run_on_ranks(world, one_by_one, plugin, gappy_batch(), {}):
        for loss, norm, gradients in found.values():
            assert loss == pytest.approx(4.533847, abs=LOSS)
            assert norm == pytest.approx(5.895990, rel=1e-5)
            assert_close(gradients, one.gradients, GRADIENT)


@pytest.mark.parametrize("given", [{}, {"num_items_in_batch": 18}], ids=["token-weighted", "num_items_in_batch"])
@pytest.mark.parametrize("plugin", ["pp2", "pp2, zero 1"])
def test_unequal_replicas_give_the_mean_over_all_targets(plugin, given):
    """Two replicas of two stages, 36 targets in all."""
    one = Single(tiny_model("LL")).step(unequal_batch())
    for found in run_on_ranks(4, one_by_one, plugin, unequal_batch(), given):
        for loss, norm, gradients in found.values():
            assert loss == pytest.approx(4.523951, abs=LOSS)
            assert norm == pytest.approx(5.518390, rel=1e-5)
            assert_close(gradients, one.gradients, GRADIENT)


def two_tied_steps(plugin):
    """SGD with one micro-batch, then Adam with several: the step after a step starts from the new weights everywhere."""
    losses = []
    for optimizer_fn in (sgd, adamw):
        run = Boosted(plugin, tiny_model("LT"), optimizer_fn, num_microbatches=3)
        losses += [run.step({"input_ids": ids(4, 8), "labels": ids(4, 8)}) for _ in range(2)]
    return losses


def test_the_second_step_sees_the_first_on_both_stages():
    wanted = []
    for optimizer_fn in (sgd, adamw):
        one = Single(tiny_model("LT"), optimizer_fn)
        for _ in range(2):
            one.step({"input_ids": ids(4, 8), "labels": ids(4, 8)})
        wanted += one.losses
    for losses in run_on_ranks(2, two_tied_steps, "pp2"):
        assert losses == pytest.approx(wanted, abs=LOSS, rel=0)
