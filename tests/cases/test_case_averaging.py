"""AVG-1 and AVG-2: the loss is the mean over the targets of the global batch, however unequal the shares are."""

import pytest
import torch
import transformers
from field_cases import (
    DATA_PARALLEL,
    GRADIENT,
    IGNORED,
    LOSS,
    TWO_REPLICAS,
    Boosted,
    Single,
    assert_close,
    norm_of,
    whole_batch,
)

from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import tiny_model


def unequal_batch():
    """6 targets in the first two rows, 30 in the last two."""
    batch = whole_batch()
    batch["labels"][:2, 4:] = IGNORED
    return batch


def gappy_batch():
    """3, 0, 15 and 15 targets."""
    batch = whole_batch()
    batch["labels"][0, 4:] = IGNORED
    batch["labels"][1] = IGNORED
    return batch


def backward(plugin, batch, through, given, options):
    """Loss and gradients; `given` goes to the model beside the rank's share of the batch."""
    run = Boosted(plugin, tiny_model("LL"), **options)
    loss = getattr(run, through)(batch | given)
    return loss, run.gradients_by_step(), run.optimizer.grad_norm


WAYS = {
    "loop": ("backward", {}),
    "execute_pipeline": ("pipeline", {}),
    "micro-batches of 1": ("pipeline", {"microbatch_size": 1}),
    "2 micro-batches": ("pipeline", {"num_microbatches": 2}),
}


@pytest.mark.sample("*-token-weighted-loop", "*-num_items_in_batch-2 micro-batches")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given", [{}, {"num_items_in_batch": 18}], ids=["token-weighted", "num_items_in_batch"])
@pytest.mark.parametrize("plugin, world", TWO_REPLICAS)
def test_unequal_ranks_give_the_mean_over_all_targets(plugin, world, given, way):
    one = Single(tiny_model("LL")).step(unequal_batch())
    assert (one.losses[0], one.norms[0]) == (pytest.approx(4.523951, abs=1e-6), pytest.approx(5.518390, rel=1e-6))
    for loss, gradients, norm in run_on_ranks(
        world, backward, plugin, unequal_batch(), WAYS[way][0], given, WAYS[way][1]
    ):
        assert loss == pytest.approx(4.523951, abs=LOSS)
        assert norm == pytest.approx(5.518390, rel=1e-5)
        assert_close(gradients, one.gradients, GRADIENT)


@pytest.mark.parametrize(
    "plugin, world", [("dp", 1), ("dp", 2), ("tp2", 2), ("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)]
)
def test_a_micro_batch_without_targets_weighs_nothing(plugin, world):
    """On the first of two ranks it is the last micro-batch, the one whose backward would reduce."""
    one = Single(tiny_model("LL")).step(gappy_batch())
    assert (one.losses[0], one.norms[0]) == (pytest.approx(4.533847, abs=1e-6), pytest.approx(5.895990, rel=1e-6))
    answers = run_on_ranks(world, backward, plugin, gappy_batch(), "pipeline", {}, {"microbatch_size": 1}, timeout_s=30)
    for loss, gradients, norm in answers:
        assert loss == pytest.approx(4.533847, abs=LOSS)
        assert norm == pytest.approx(5.895990, rel=1e-5)
        assert_close(gradients, one.gradients, GRADIENT)


def rank_without_targets():
    batch = whole_batch()
    batch["labels"][:2] = IGNORED
    return batch


@pytest.mark.sample("*-loop", "*-2 micro-batches")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plugin", DATA_PARALLEL)
def test_a_rank_without_targets_weighs_nothing(plugin, way):
    one = Single(tiny_model("LL")).step(rank_without_targets())
    through, options = WAYS[way]
    for loss, gradients, norm in run_on_ranks(
        2, backward, plugin, rank_without_targets(), through, {}, options, timeout_s=30
    ):
        assert loss == pytest.approx(one.losses[0], abs=LOSS)
        assert norm == pytest.approx(one.norms[0], rel=1e-5)
        assert_close(gradients, one.gradients, GRADIENT)


def masked_lm():
    """A model that computes its loss by itself, where transformers offers no door."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.BertForMaskedLM(config)


def backward_masked_lm(plugin, batch, through):
    run = Boosted(plugin, masked_lm())
    return getattr(run, through)(batch), run.gradients_by_step(), run.optimizer.grad_norm


@pytest.mark.sample("*-unequal_batch-backward", "*-rank_without_targets-pipeline")
@pytest.mark.parametrize("through", ["backward", "pipeline"])
@pytest.mark.parametrize("batch_fn", [unequal_batch, rank_without_targets])
@pytest.mark.parametrize("plugin", DATA_PARALLEL)
def test_a_model_with_its_own_loss_is_averaged_over_all_targets(plugin, batch_fn, through):
    one = Single(masked_lm()).step(batch_fn())
    for loss, gradients, norm in run_on_ranks(2, backward_masked_lm, plugin, batch_fn(), through, timeout_s=30):
        assert loss == pytest.approx(one.losses[0], abs=LOSS)
        assert norm == pytest.approx(one.norms[0], rel=1e-5)
        assert_close(gradients, one.gradients, GRADIENT)


def rows_one_by_one(plugin):
    """The four rows as four accumulation steps of the plain loop; 33 targets in all."""
    run = Boosted(plugin, tiny_model("LL"))
    rows = [{key: value[i : i + 1] for key, value in gappy_batch().items()} for i in range(4)]
    losses = [run.backward(row | {"num_items_in_batch": 33}) for row in rows]
    gradients = run.gradients_by_step()
    return losses, gradients, run.model(**rows[1]).loss.item()


@pytest.mark.parametrize("plugin", DATA_PARALLEL)
def test_accumulated_rows_with_one_without_targets(plugin):
    one = Single(tiny_model("LL")).step(gappy_batch())
    [(losses, gradients, empty)] = run_on_ranks(1, rows_one_by_one, plugin)
    assert losses[1] == empty == 0.0
    assert sum(losses) == pytest.approx(4.533847, abs=LOSS)
    assert norm_of(gradients) == pytest.approx(5.895990, rel=1e-5)
    assert_close(gradients, one.gradients, GRADIENT)
