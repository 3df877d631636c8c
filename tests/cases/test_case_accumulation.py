"""ACC-1: every micro-step counts, with and without no_sync, and zero_grad forgets them."""

from contextlib import nullcontext

import pytest
from field_cases import GRADIENT, TWO_REPLICAS, Boosted, Single, assert_close, norm_of, whole_batch

import colonnade
from colonnade.errors import UsageError
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import tiny_model

MICRO_STEPS = 3


def batches():
    return [whole_batch(seed=7 + k) for k in range(MICRO_STEPS)]


def accumulate(plugin, no_sync):
    run = Boosted(plugin, tiny_model("LL"))
    sent = []
    for k, batch in enumerate(batches()):
        inside = no_sync and k + 1 < MICRO_STEPS
        with colonnade.ledger() as ledger, run.booster.no_sync(run.model, run.optimizer) if inside else nullcontext():
            run.backward(batch, scale=1 / MICRO_STEPS)
        sent.append(ledger.elements["reduce_scatter", "dp"] + ledger.elements["all_reduce", "dp"])
    held = sum(p.numel() for p in run.user.parameters())
    first = run.gradients_by_step()
    run.optimizer.zero_grad()
    run.backward(whole_batch(seed=20))
    return first, run.gradients_by_step(), sent, held


@pytest.mark.parametrize("no_sync", [False, True], ids=["plain", "no_sync"])
@pytest.mark.parametrize("plugin, world", TWO_REPLICAS)
def test_every_micro_step_counts(plugin, world, no_sync):
    one = Single(tiny_model("LL")).step(*batches())
    assert one.norms[0] == pytest.approx(2.138389, rel=1e-6)
    first_wanted = dict(one.gradients)
    one.step(whole_batch(seed=20))
    if no_sync and plugin.endswith("zero 2"):
        assert run_on_ranks(world, refused, plugin) == ["leave no_sync out"] * world
        return
    for first, second, sent, held in run_on_ranks(world, accumulate, plugin, no_sync):
        assert norm_of(first) == pytest.approx(2.138389, rel=1e-5)
        assert_close(first, first_wanted, GRADIENT)
        assert_close(second, one.gradients, GRADIENT)
        assert sent == ([0, 0, held] if no_sync else [held] * 3)


def refused(plugin):
    """Gradients that are nowhere whole cannot wait; asking for it is an error that says so."""
    run = Boosted(plugin, tiny_model("LL"))
    assert not run.plugin.support_no_sync()
    try:
        run.booster.no_sync(run.model, run.optimizer)
    except UsageError as error:
        return str(error).rpartition("; ")[2].rstrip(".")
