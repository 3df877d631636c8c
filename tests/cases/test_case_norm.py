"""NORM-1: replicated parameters count once in the gradient norm, and clipping clips."""

import pytest
from field_cases import GRADIENT, Boosted, Single, assert_close, norm_of, whole_batch

from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import tiny_model


def clipped_step():
    run = Boosted("tp2", tiny_model("LL"), max_norm=1.0)
    run.backward(whole_batch())
    update = run.gradients_by_step()
    return run.optimizer.grad_norm, update


@pytest.mark.parametrize("world", [2, 4])
def test_norm_counts_each_parameter_once_and_clipping_acts(world):
    one = Single(tiny_model("LL")).step(whole_batch())
    assert one.norms[0] == pytest.approx(4.387698, rel=1e-6)
    for norm, update in run_on_ranks(world, clipped_step):
        assert norm == pytest.approx(4.387698, rel=1e-5)
        assert norm_of(update) == pytest.approx(1.0, abs=1e-5)
        assert_close(update, {name: g / one.norms[0] for name, g in one.gradients.items()}, GRADIENT)
