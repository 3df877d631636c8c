"""What `execute_pipeline` takes for a loss, with stages and without: one number, or an error that says what was given."""

import pytest
import torch
from torch.optim import AdamW

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from colonnade.errors import UsageError
from colonnade.testing.ranks import RankFailure, run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

PLUGINS = {
    "ddp": (TorchDDPPlugin, {}),
    "zero": (LowLevelZeroPlugin, {"stage": 2}),
    "fsdp": (TorchFSDPPlugin, {}),
    "tp": (HybridParallelPlugin, {"tp_size": 2}),
    "pp": (HybridParallelPlugin, {"pp_size": 2}),
    "pp, zbv": (HybridParallelPlugin, {"pp_size": 2, "pp_style": "zbv"}),
}
WRONG = {
    "a row each": (lambda out, inputs: out["logits"].float().mean((1, 2)), r"a tensor of shape \(2,\)"),
    "nothing": (lambda out, inputs: None, "a NoneType"),
    "a float": (lambda out, inputs: 1.0, "a float"),
}


def boosted(name):
    plugin_class, options = PLUGINS[name]
    model = tiny_model("LL")
    booster = Booster(plugin=plugin_class(precision="fp32", microbatch_size=2, **options))
    model, optimizer, *_ = booster.boost(model, AdamW(model.parameters()))
    return booster, model, optimizer


def batch():
    x = ids(4, 8)
    return {"input_ids": x, "labels": x}


def taken(name):
    booster, model, optimizer = boosted(name)
    found = []
    for criterion in (None, lambda out, inputs: out["loss"], lambda out, inputs: out["loss"].view(1, 1)):
        loss = booster.execute_pipeline(iter([batch()]), model, criterion, optimizer)["loss"]
        optimizer.zero_grad()
        assert loss.shape == ()
        found.append(loss.item())
    assert found[0] == found[1] == found[2]
    with torch.no_grad():  # outputs alone need no loss, so no labels
        out = booster.execute_pipeline(iter([{"input_ids": ids(4, 8)}]), model, return_loss=False, return_outputs=True)
    assert out["loss"] is None
    assert out["outputs"] is None or out["outputs"]["logits"].shape[:2] == (4, 8)
    return found[0], out["outputs"] is not None


@pytest.mark.parametrize("name", PLUGINS)
def test_a_loss_of_one_entry_is_a_scalar_everywhere_and_outputs_need_none(name):
    answers = run_on_ranks(2, taken, name)
    assert len({loss for loss, _ in answers}) == 1
    assert any(has_outputs for _, has_outputs in answers)


def refused(name):
    booster, model, optimizer = boosted(name)
    for criterion, words in WRONG.values():
        for given in (optimizer, None):
            with pytest.raises(UsageError, match=f"(?s)the criterion gave {words} for a loss.*one number"):
                booster.execute_pipeline(iter([batch()]), model, criterion, given)


@pytest.mark.parametrize("name", ["ddp", "tp"])
def test_what_is_no_number_is_refused(name):
    run_on_ranks(2, refused, name)


def refused_on_last_stage(kind):
    booster, model, optimizer = boosted("pp")
    booster.execute_pipeline(iter([batch()]), model, WRONG[kind][0], optimizer)


@pytest.mark.sample("a row each")
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_number_ends_a_pipeline(kind):
    with pytest.raises(RankFailure, match=f"(?s)the criterion gave {WRONG[kind][1]} for a loss.*one number"):
        run_on_ranks(2, refused_on_last_stage, kind)
