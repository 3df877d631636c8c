"""ACC-1: every micro-step counts, with and without no_sync, and zero_grad forgets them."""

from contextlib import nullcontext

import pytest
from field_cases import GRADIENT, Boosted, Single, assert_close, norm_of, whole_batch

import colonnade
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import tiny_model

MICRO_STEPS = 3


def batches():
    return [whole_batch(seed=7 + k) for k in range(MICRO_STEPS)]


def accumulate(plugin, no_sync):
    run = Boosted(plugin, tiny_model("LL"))
    assert run.plugin.support_no_sync()
    sent = []
    for k, batch in enumerate(batches()):
        inside = no_sync and k + 1 < MICRO_STEPS
        with colonnade.ledger() as ledger, run.booster.no_sync(run.model, run.optimizer) if inside else nullcontext():
            run.backward(batch, scale=1 / MICRO_STEPS)
        sent.append(ledger.elements["reduce_scatter" if plugin == "fsdp" else "all_reduce", "dp"])
    first = run.gradients_by_step()
    run.optimizer.zero_grad()
    run.backward(whole_batch(seed=20))
    return first, run.gradients_by_step(), sent


@pytest.mark.parametrize("no_sync", [False, True], ids=["plain", "no_sync"])
@pytest.mark.parametrize("plugin", ["ddp", "dp", "fsdp"])
def test_every_micro_step_counts(plugin, no_sync):
    one = Single(tiny_model("LL")).step(*batches())
    assert one.norms[0] == pytest.approx(2.138389, rel=1e-6)
    first_wanted = dict(one.gradients)
    one.step(whole_batch(seed=20))
    parameters = sum(gradient.numel() for gradient in first_wanted.values())
    for first, second, sent in run_on_ranks(2, accumulate, plugin, no_sync):
        assert norm_of(first) == pytest.approx(2.138389, rel=1e-5)
        assert_close(first, first_wanted, GRADIENT)
        assert_close(second, one.gradients, GRADIENT)
        assert sent == ([0, 0, parameters] if no_sync else [parameters] * 3)
