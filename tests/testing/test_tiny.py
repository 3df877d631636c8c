"""The figures that plain transformers gives for the tiny models, so that everyone builds on the same ones."""

import pytest
import torch

from colonnade.testing.tiny import TINY, ids, tiny_model


def loss_and_norm(model, x, **inputs):
    loss = model(input_ids=x, **({"labels": x} | inputs)).loss
    loss.backward()
    return loss.item(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


@pytest.mark.parametrize(
    "name, overrides, shape, loss, norm",
    [
        ("LL", {}, (4, 16), 4.494046, 4.387698),
        ("LT", {}, (4, 16), None, 4.478679),
        ("LL", {"num_key_value_heads": 1}, (4, 16), 4.673724, None),
        ("LL", {"num_hidden_layers": 5}, (4, 16), 4.596096, None),
        ("G2", {}, (2, 16), 4.825294, None),
        ("OP", {}, (4, 16), 4.639354, None),
        ("MX", {"router_aux_loss_coef": 0.0}, (4, 16), None, 2.678538),
        ("MX", {}, (4, 16), 4.525518, None),
        ("MX8", {}, (1, 2), 4.155247, None),
    ],
)
def test_loss_and_gradient_norm_are_the_known_ones(name, overrides, shape, loss, norm):
    found_loss, found_norm = loss_and_norm(tiny_model(name, **overrides), ids(*shape))
    if loss is not None:
        assert found_loss == pytest.approx(loss, abs=2e-6)
    if norm is not None:
        assert found_norm == pytest.approx(norm, rel=2e-6)


def test_left_padding_gives_the_known_loss():
    x = ids(2, 12)
    mask = torch.ones_like(x)
    mask[0, :5] = 0
    loss, _ = loss_and_norm(tiny_model("OP"), x, attention_mask=mask, labels=x.masked_fill(mask == 0, -100))
    assert loss == pytest.approx(4.358157, abs=2e-6)


def test_an_odd_vocabulary_gives_the_known_figures():
    x = ids(4, 16, vocab=67)
    x[0, 5], x[1, 7] = 64, 66
    loss, norm = loss_and_norm(tiny_model("LT", vocab_size=67), x)
    assert loss == pytest.approx(4.529266, abs=2e-6)
    assert norm == pytest.approx(4.334238, rel=2e-6)


def test_sizes_are_the_known_ones():
    assert sum(p.numel() for p in tiny_model("LL").parameters()) == 41_248
    assert sum(p.numel() for p in tiny_model("LT").parameters()) == 39_200
    assert len(list(tiny_model("LT").parameters())) == 38
    assert len(tiny_model("LL").state_dict()) == 39


@pytest.mark.parametrize("name", TINY)
def test_every_model_is_the_same_twice_and_without_dropout(name):
    state = torch.get_rng_state()
    model, twin = tiny_model(name), tiny_model(name)
    assert torch.get_rng_state().equal(state)
    assert model.config.use_cache is False
    for (key, weight), other in zip(model.named_parameters(), twin.parameters()):
        assert weight.equal(other), key
        assert weight.std() > 0.1, key
    x = ids(2, 8)
    assert model.train()(input_ids=x, labels=x).loss.equal(model.eval()(input_ids=x, labels=x).loss)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no tiny model 'llama'; there are LL, LT"):
        tiny_model("llama")
