"""HEAD-1 (b): head counts that do not divide are refused at once. HEAD-2: a fused qkv weight is split part by part."""

import pytest
import torch
import torch.distributed as dist
from field_cases import GRADIENT, LOSS, Boosted, Single, assert_close, assert_equal_bits, make_plugin, sgd, whole_batch
from safetensors.torch import load_file
from torch.optim import SGD
from transformers import AutoModelForCausalLM

import colonnade
from colonnade.booster import Booster
from colonnade.errors import ConfigError
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model


def refused():
    """Boost a model of 6 heads on 4 tensor-parallel ranks; what is said, what was sent, and what is left."""
    model = tiny_model("LL", num_attention_heads=6, num_key_value_heads=6, hidden_size=48)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    plugin = make_plugin("tp4")
    with colonnade.ledger() as ledger, pytest.raises(ConfigError) as caught:
        Booster(plugin=plugin).boost(model, sgd(model))
    assert isinstance(caught.value, ValueError)
    assert_equal_bits(dict(model.named_parameters()), before)
    assert [type(module) for module in model.modules()] == classes
    one = torch.ones(1)
    dist.all_reduce(one)
    run = Boosted("tp2", model)  # the same objects, with a size that the message names
    return str(caught.value), dict(ledger.calls), one.item(), run.step(whole_batch())


def test_heads_that_do_not_divide_are_refused_on_every_rank_before_any_collective():
    model = tiny_model("LL", num_attention_heads=6, num_key_value_heads=6, hidden_size=48)
    one = Single(model).step(whole_batch())
    answers = run_on_ranks(4, refused)
    assert len({message for message, *_ in answers}) == 1
    for message, calls, ones, loss in answers:
        assert "tp_size=4 does not fit LlamaForCausalLM" in message
        assert "6 = 4 × 1 + 2" in message
        assert "tp_size=1 or 2" in message
        assert ones == 4
        assert loss == pytest.approx(one.losses[0], abs=LOSS)
        assert calls == {}


def fused_qkv(tp, path):
    run = Boosted(f"tp{tp}", tiny_model("G2"))
    loss = run.backward(whole_batch(2))
    gradients = run.gradients_by_step()
    still = Boosted(f"tp{tp}", tiny_model("G2"), lambda model: SGD(model.parameters(), lr=0.0))
    still.step(whole_batch(2))
    still.booster.save_model(still.model, path)
    return loss, gradients, tuple(run.user.transformer.h[0].attn.c_attn.weight.shape)


@pytest.mark.parametrize("tp", [2, 4])
def test_fused_qkv_is_split_part_by_part(tp, tmp_path):
    one = Single(tiny_model("G2")).step(whole_batch(2))
    assert one.losses[0] == pytest.approx(4.825294, abs=1e-6)
    for loss, gradients, shape in run_on_ranks(tp, fused_qkv, tp, tmp_path / "model"):
        assert shape == (32, 96 // tp)
        assert loss == pytest.approx(4.825294, abs=LOSS)
        assert_close(gradients, one.gradients, GRADIENT)
    saved, original = load_file(tmp_path / "model" / "model.safetensors"), dict(tiny_model("G2").named_parameters())
    assert saved.keys() == original.keys()
    for name, value in original.items():
        assert torch.equal(saved[name], value), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(loaded(ids(2, 16)).logits, tiny_model("G2")(ids(2, 16)).logits)
