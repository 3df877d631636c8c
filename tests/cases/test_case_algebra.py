"""ALG-1: the bias of a row-parallel layer is added once, and its gradient is whole."""

import pytest
import torch
from field_cases import GRADIENT, IGNORED, LOSS, Boosted, Single, assert_close

from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model


def padded_batch():
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    x = ids(2, 12)
    return {"input_ids": x, "attention_mask": mask, "labels": x.masked_fill(mask == 0, IGNORED)}


def one_step():
    run = Boosted("tp2", tiny_model("OP"))
    loss = run.backward(padded_batch())
    gradients = run.gradients_by_step()  # compares the ranks' copies before and after the step
    biases = {n: p.detach() for n, p in run.user.named_parameters() if n.endswith(("out_proj.bias", "fc2.bias"))}
    return loss, gradients, biases


def test_row_parallel_bias_is_added_once():
    one = Single(tiny_model("OP")).step(padded_batch())
    assert one.losses[0] == pytest.approx(4.358157, abs=1e-6)
    answers = run_on_ranks(2, one_step)
    for loss, gradients, biases in answers:
        assert loss == pytest.approx(4.358157, abs=LOSS)
        assert_close(gradients, one.gradients, GRADIENT)
        assert len(biases) == 8
        for name, bias in biases.items():
            assert torch.equal(bias, answers[0][2][name]), name
