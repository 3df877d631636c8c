"""HEAD-1: fewer key/value heads than ranks, and heads that do not divide. HEAD-2: a fused qkv weight is split by parts."""

import pytest
import torch
from field_cases import GRADIENT, LOSS, WEIGHT, Boosted, Single, Trained, adamw, assert_close, whole_batch
from safetensors.torch import load_file
from torch.optim import SGD
from transformers import AutoModelForCausalLM

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_object
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

K_PROJ = "model.layers.0.self_attn.k_proj.weight"


def scarce(**overrides):
    return tiny_model("LL", **overrides)


def by_layout(tp, path, overrides):
    """Loss and gradients of one step, weights after three of AdamW, the ranks' k_proj, and what is saved."""
    run = Boosted(f"tp{tp}", scarce(**overrides))
    loss = run.backward(whole_batch())
    gradients = run.gradients_by_step()
    adam = Boosted(f"tp{tp}", scarce(**overrides), adamw)
    for _ in range(3):
        adam.step(whole_batch())
    adam.booster.save_model(adam.model, path)
    key = adam.user.get_parameter(K_PROJ).detach()
    return loss, gradients, adam.weights(), all_gather_object(key, Axis.of(None))


def trained(overrides):
    return Trained(lambda: scarce(**overrides), adamw, [whole_batch()] * 3)


def test_one_key_value_head_is_held_by_both_ranks_and_its_gradient_is_their_sum(tmp_path):
    overrides = {"num_key_value_heads": 1}
    one, wanted = Single(scarce(**overrides)).step(whole_batch()), trained(overrides)
    assert one.losses[0] == pytest.approx(4.673724, abs=1e-6)
    for loss, gradients, weights, keys in run_on_ranks(2, by_layout, 2, tmp_path / "model", overrides):
        assert loss == pytest.approx(4.673724, abs=LOSS)
        assert_close(gradients, one.gradients, GRADIENT)
        assert gradients[K_PROJ].norm().item() == pytest.approx(0.787613, abs=1e-5)
        assert torch.equal(*keys)
        wanted.assert_weights(weights)
    assert load_file(tmp_path / "model" / "model.safetensors")[K_PROJ].shape == (8, 32)


def test_heads_that_do_not_divide_are_dealt_out(tmp_path):
    """6 heads on 4 ranks: 2 + 2 + 1 + 1."""
    overrides = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
    one = Single(scarce(**overrides)).step(whole_batch())
    by_rank = run_on_ranks(4, by_layout, 4, tmp_path / "model", overrides)
    for loss, gradients, _, keys in by_rank:
        assert loss == pytest.approx(one.losses[0], abs=LOSS)
        assert_close(gradients, one.gradients, GRADIENT)
        assert [len(key) for key in keys] == [16, 16, 8, 8]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_close(dict(loaded.named_parameters()), by_rank[0][2], WEIGHT)


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
