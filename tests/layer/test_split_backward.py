"""Whole models whose backward pass is split: inputs' gradients first, weights' gradients later, nothing computed twice."""

from collections import Counter

import pytest
import torch
from split_runs import (
    assert_same,
    batch,
    build,
    embedding_weights,
    gradients,
    in_two,
    linears,
    lora,
    ordinary,
)

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.shardformer.layer.deferred import WeightGradients, split_backward
from colonnade.testing.ranks import on_ranks, run_on_ranks
from colonnade.testing.tiny import tiny_model

MODELS = ["LL", "LT", "G2", "OP", "bert", "lora"]


def prepared(name):
    model = build(name)
    split_backward(model)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_an_ordinary_backward_and_no_product_is_made_twice(name):
    wanted, products = ordinary(build(name))
    model = prepared(name)
    after_b, found, (f, b, w) = in_two(model)
    assert_same(found, wanted)
    assert f.counts + b.counts + w.counts == products.counts
    layers = linears(model)
    assert w.total() == len(layers)  # each weight's gradient, and nothing else
    shared = embedding_weights(model)  # a tied one has the embedding's part
    late = {f"{n}.weight" for n, m in layers.items() if id(m.weight) not in shared}
    assert late
    assert not late & after_b.keys()
    assert {name for name, p in model.named_parameters() if p.requires_grad} - late == after_b.keys()


def test_a_tied_weight_has_the_embeddings_part_after_b_and_both_after_w():
    wanted, _ = ordinary(build("LT"))
    model = prepared("LT")
    after_b, found, _ = in_two(model)
    name = "model.embed_tokens.weight"
    assert not torch.allclose(after_b[name], wanted[name])
    torch.testing.assert_close(found[name], wanted[name])


@pytest.mark.parametrize("name", ["LT", "G2"])
def test_micro_batches_may_be_interleaved(name):
    wanted, _ = ordinary(build(name), batch(1), batch(2))
    model = prepared(name)
    stores, losses = [WeightGradients(), WeightGradients()], []
    for seed, store in enumerate(stores, 1):
        with store.deferring():
            losses.append(model(**batch(seed)).loss)
    for loss, store in zip(losses, stores):
        with store.deferring():
            loss.backward()
    for store in stores:
        assert store.held_bytes
        store.run()
        assert not store.held_bytes
    assert_same(gradients(model), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["LT", "G2", "bert", "lora"])
def test_blocks_may_be_recomputed(name, reentrant):
    def recomputed(model):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return model

    wanted, products = ordinary(recomputed(build(name)))
    model = recomputed(prepared(name))
    _, found, (f, b, w) = in_two(model)
    assert_same(found, wanted)
    assert f.counts + b.counts + w.counts == products.counts
    assert w.total() == len(linears(model))


@pytest.mark.parametrize("name", MODELS)
def test_without_a_store_a_prepared_model_is_the_ordinary_one(name):
    wanted, products = ordinary(build(name))
    found, same = ordinary(prepared(name))
    assert same.counts == products.counts
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", ["LT", "G2"])
def test_a_backward_without_a_store_makes_everything_at_once(name):
    wanted, products = ordinary(build(name))
    model = prepared(name)
    with WeightGradients().deferring():
        loss = model(**batch()).loss
    loss.backward()
    assert_same(gradients(model), wanted)


def test_hooks_are_called_once_in_each_w_and_never_without_a_gradient():
    wanted, _ = ordinary(build("LL"))
    model = prepared("LL")
    calls = Counter()

    def doubled(name):
        def hook(grad):
            assert grad is not None
            calls[name, "tensor"] += 1
            return 2 * grad

        return hook

    def ready(name):
        def hook(param):
            assert param.grad is not None
            calls[name, "accumulated"] += 1

        return hook

    for name, parameter in model.named_parameters():
        parameter.register_hook(doubled(name))
        parameter.register_post_accumulate_grad_hook(ready(name))
    late = {f"{n}.weight" for n in linears(model)}
    for steps in (1, 2):
        after_b, found, _ = in_two(model)
        assert set(calls.values()) == {steps}
        assert calls.keys() == {(name, kind) for name in wanted for kind in ("tensor", "accumulated")}
        assert steps > 1 or not late & after_b.keys()
        assert_same(found, {name: 2 * steps * grad for name, grad in wanted.items()})


def test_bfloat16_gives_the_bits_of_an_ordinary_backward():
    wanted, _ = ordinary(build("LL").bfloat16())
    _, found, _ = in_two(prepared("LL").bfloat16())
    assert found["lm_head.weight"].dtype is torch.bfloat16
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def over_two(name, model=None):
    plugin = HybridParallelPlugin(tp_size=2, precision="fp32")
    model, *_ = Booster(plugin=plugin).boost(model or build(name))
    return model.unwrap()


def in_two_over_two_ranks(name, sums):
    """Compare with an ordinary backward over two ranks; `sums` weights have their gradient summed over the ranks."""
    model = over_two(name)
    with colonnade.ledger() as usual:
        wanted, products = ordinary(model)
    model.zero_grad()
    split_backward(model)
    weights = WeightGradients()
    with colonnade.ledger() as before, weights.deferring():
        model(**batch()).loss.backward()
    after_b = gradients(model)
    with colonnade.ledger() as w:
        weights.run()
    assert_same(gradients(model), wanted)
    assert before.calls + w.calls == usual.calls
    assert before.elements + w.elements == usual.elements
    assert sum(w.calls.values()) == w.calls["all_reduce", "tp"] == sums
    shared = embedding_weights(model)
    late = {f"{n}.weight" for n, m in linears(model).items() if id(m.weight) not in shared}
    assert late
    assert not late & after_b.keys()
    model.zero_grad()
    _, again, (f, b, w) = in_two(model)
    assert_same(again, wanted)
    assert f.total() + b.total() + w.total() == products.total()
    assert w.total() == len(linears(model))


@pytest.mark.parametrize("name", ["LL", "LT", "G2", "OP"])
def test_on_two_ranks_the_same_collectives_are_made_and_w_needs_none(name):
    run_on_ranks(2, in_two_over_two_ranks, name, 0)


def test_on_two_ranks_the_shares_of_an_adapters_gradient_are_summed_in_w():
    run_on_ranks(2, in_two_over_two_ranks, "lora", 2 * 4)  # A of q_proj and of v_proj, in each of 4 blocks


@on_ranks(2)
def test_a_weight_that_both_ranks_hold_is_summed_once_in_each_w():
    model = over_two("LL", tiny_model("LL", vocab_size=67, num_key_value_heads=1))
    wanted, _ = ordinary(model)
    model.zero_grad()
    weights = WeightGradients()
    with weights.deferring():
        model(**batch()).loss.backward()
    with colonnade.ledger() as ledger:
        weights.run()
    assert ledger.calls["all_reduce", "tp"] == 2 * 4  # k_proj and v_proj
    assert_same(gradients(model), wanted)


@on_ranks(2)
def test_blocks_may_be_recomputed_on_two_ranks():
    for name in ("LT", "G2"):
        model = over_two(name)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        wanted, products = ordinary(model)
        model.zero_grad()
        split_backward(model)
        _, found, counts = in_two(model)
        assert_same(found, wanted)
        assert sum(c.total() for c in counts) == products.total()


def test_an_adapted_conv1d_is_split_too():
    def adapted():
        return lora("G2", ("c_attn", "c_proj", "c_fc"))

    wanted, products = ordinary(adapted())
    model = adapted()
    split_backward(model)
    _, found, (f, b, w) = in_two(model)
    assert_same(found, wanted)
    assert f.counts + b.counts + w.counts == products.counts
