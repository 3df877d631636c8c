"""What a training step communicates, counted by the ledger and held against the limits.

L blocks, b rows, s tokens, h width, t tensor-parallel ranks, Ψ parameter elements of a rank.
"""

import pytest
import torch

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, TorchDDPPlugin
from colonnade.testing.ranks import on_ranks, run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

B, S, VOCAB = 2, 12, 67


def boosted(name, plugin, **overrides):
    model = tiny_model(name, **{"vocab_size": VOCAB} | overrides)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return booster, model, optimizer


def batch(rank=0):
    x = ids(B, S, 7 + rank, VOCAB)
    return {"input_ids": x, "labels": x}


def count_step(booster, model, optimizer):
    """Ledgers of the forward, the backward and the optimizer step."""
    with colonnade.ledger() as forward:
        loss = model(**batch()).loss
    with colonnade.ledger() as backward:
        booster.backward(loss, optimizer)
    with colonnade.ledger() as step:
        optimizer.step()
        optimizer.zero_grad()
    return forward, backward, step


def tensor_parallel_step(name, tp_size, all_reduces, overrides):
    """Traffic of a step with `all_reduces` = a·L + 2 all-reduces, and of a second one, which is no different."""
    booster, model, optimizer = boosted(name, HybridParallelPlugin(tp_size=tp_size, precision="fp32"), **overrides)
    config = model.unwrap().config
    layers, tokens = config.num_hidden_layers, B * S
    for _ in range(2):
        with colonnade.ledger() as whole:
            forward, backward, step = count_step(booster, model, optimizer)
        per_layer = all_reduces - 2
        assert whole.calls["all_reduce", "tp"] == per_layer * layers + 2
        assert whole.elements["all_reduce", "tp"] == (per_layer * layers + 2) * tokens * config.hidden_size
        assert forward.calls["all_reduce", "tp"] == 2 * layers + 1
        assert backward.calls["all_reduce", "tp"] == (per_layer - 2) * layers + 1
        # logits are never gathered: what is gathered is a few numbers a token for the loss, and one for the norm
        assert forward.elements["all_gather", "tp"] / tp_size <= 3 * tokens
        assert not backward.calls["all_gather", "tp"]
        assert step.elements["all_gather", "tp"] / tp_size <= 2
        assert {key[0] for key in whole.calls} <= {"all_reduce", "all_gather"}
        assert {key[1] for key in whole.calls} == {"tp"}


CASES = {
    "llama, untied": ("LL", {}),
    "llama, tied": ("LT", {}),
    "llama, 8 heads": ("llama-gqa8", {}),
    "qwen2, biases": ("qwen2", {}),
    "mistral": ("mistral", {}),
    "gpt2, tied": ("G2", {}),
    "gpt2, untied": ("G2", {"tie_word_embeddings": False}),
    "opt": ("OP", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_on_two_ranks_takes_4_all_reduces_a_layer_and_2(case):
    name, overrides = CASES[case]
    run_on_ranks(2, tensor_parallel_step, name, 2, 4 + 2, overrides)


@pytest.mark.parametrize("case", ["llama, 8 heads", "llama, tied", "gpt2, tied"])
def test_a_step_on_four_ranks_takes_as_many(case):
    name, overrides = CASES[case]
    if name == "LT":
        overrides = overrides | {"num_key_value_heads": 4}
    run_on_ranks(4, tensor_parallel_step, name, 4, 4 + 2, overrides)


@on_ranks(2)
def test_norms_inside_the_heads_add_their_own_small_gradients():
    """Qwen3 sums the gradients of q_norm and k_norm: two all-reduces of one head's width a layer."""
    booster, model, optimizer = boosted("qwen3", HybridParallelPlugin(tp_size=2, precision="fp32"))
    config = model.unwrap().config
    with colonnade.ledger() as book:
        count_step(booster, model, optimizer)
    layers = config.num_hidden_layers
    assert book.calls["all_reduce", "tp"] == 6 * layers + 2
    wide = (4 * layers + 2) * B * S * config.hidden_size
    assert book.elements["all_reduce", "tp"] == wide + 2 * layers * config.head_dim


def step_with_scarce_heads(name, tp_size, overrides, more_calls, more_elements):
    """4L + 2 all-reduces of hidden states, and beside them in each layer so many more of so many elements together."""
    booster, model, optimizer = boosted(name, HybridParallelPlugin(tp_size=tp_size, precision="fp32"), **overrides)
    config = model.unwrap().config
    layers, wide = config.num_hidden_layers, B * S * config.hidden_size
    for _ in range(2):
        forward, backward, step = count_step(booster, model, optimizer)
        assert forward.calls["all_reduce", "tp"] == 2 * layers + 1
        assert forward.elements["all_reduce", "tp"] == (2 * layers + 1) * wide
        assert backward.calls["all_reduce", "tp"] == (2 + more_calls) * layers + 1
        assert backward.elements["all_reduce", "tp"] == (2 * layers + 1) * wide + layers * more_elements
        assert set(step.calls) == {("all_gather", "tp")}
        assert step.elements["all_gather", "tp"] / tp_size <= 2


# model, ranks, configuration, and what each layer adds: calls, and elements of all of them. Heads are 8 wide
SCARCE = {
    "1 key/value head on 2": ("LL", 2, {"num_key_value_heads": 1}, 2, 2 * 8 * 32),
    "1 key/value head on 4": ("LL", 4, {"num_key_value_heads": 1}, 2, 2 * 8 * 32),
    "2 key/value heads on 4": ("LL", 4, {"num_key_value_heads": 2}, 2, 2 * 16 * 32),
    "tied, 2 key/value heads on 4": ("LT", 4, {"num_key_value_heads": 2}, 2, 2 * 16 * 32),
    "2 key/value heads on 3": ("LL", 3, {"num_key_value_heads": 2}, 2, 2 * 16 * 32),
    "with biases": ("LL", 4, {"num_key_value_heads": 2, "attention_bias": True}, 4, 2 * 16 * 32 + 2 * 16),
    "qwen2, which has biases": ("qwen2", 4, {"num_key_value_heads": 2}, 4, 2 * 16 * 32 + 2 * 16),
    "qwen3, with head norms": ("qwen3", 2, {"num_key_value_heads": 1}, 4, 2 * 8 * 32 + 2 * 8),
}


@pytest.mark.parametrize("case", SCARCE)
def test_heads_that_several_ranks_hold_add_one_all_reduce_of_all_of_them_for_each_parameter(case):
    name, tp_size, overrides, calls, elements = SCARCE[case]
    run_on_ranks(tp_size, step_with_scarce_heads, name, tp_size, overrides, calls, elements)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_heads_that_do_not_divide_add_nothing(tp_size):
    """Nine heads, each with a key/value head of its own."""
    overrides = {"num_attention_heads": 9, "num_key_value_heads": 9, "hidden_size": 72}
    run_on_ranks(tp_size, tensor_parallel_step, "LL", tp_size, 4 + 2, overrides)


@on_ranks(2)
def test_frozen_keys_that_both_ranks_hold_are_not_summed():
    model = tiny_model("LL", vocab_size=VOCAB, num_key_value_heads=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("k_proj" not in name)
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32"))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]))
    _, backward, _ = count_step(booster, model, optimizer)
    assert backward.calls["all_reduce", "tp"] == 3 * 4 + 1, "v_proj alone adds one to each of four layers"


def recomputed(name, use_reentrant, again):
    booster, model, optimizer = boosted(name, HybridParallelPlugin(tp_size=2, precision="fp32"))
    user = model.unwrap()
    user.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    forward, backward, _ = count_step(booster, model, optimizer)
    layers, size = user.config.num_hidden_layers, B * S * user.config.hidden_size
    assert forward.calls["all_reduce", "tp"] == 2 * layers + 1
    assert backward.calls["all_reduce", "tp"] == (2 + again) * layers + 1
    assert backward.elements["all_reduce", "tp"] == ((2 + again) * layers + 1) * size


@pytest.mark.parametrize("name", ["LL", "G2"])
def test_recomputation_repeats_the_forward_of_each_layer(name):
    """The usual recomputation stops at the last tensor that is needed, and so never comes to the layer's last sum."""
    run_on_ranks(2, recomputed, name, use_reentrant=False, again=1)
    run_on_ranks(2, recomputed, name, use_reentrant=True, again=2)


@on_ranks(2)
def test_logits_are_gathered_where_somebody_looks_and_only_once():
    _, model, _ = boosted("LL", HybridParallelPlugin(tp_size=2, precision="fp32"))
    with colonnade.ledger() as unseen:
        output = model(**batch())
    assert unseen.elements["all_gather", "tp"] / 2 <= 3 * B * S
    with colonnade.ledger() as seen:
        assert output.logits.shape == (B, S, VOCAB)
        assert output["logits"] is output.logits
    assert seen.calls["all_gather", "tp"] == 1


def data_parallel_steps(plugin_class, kwargs, accumulate):
    """Elements all-reduced over dp in each of three steps, and the parameter elements of this rank (Ψ).

    The forward is inside `no_sync` too: torch's DDP decides there whether a backward will reduce.
    """
    plugin = plugin_class(**kwargs)
    booster, model, optimizer = boosted("LT", plugin)
    counted, mine = [], batch(plugin.mesh.rank("dp"))
    for _ in range(3):
        with colonnade.ledger() as book:
            with booster.no_sync(model, optimizer):
                for _ in range(accumulate - 1):
                    booster.backward(model(**mine).loss / accumulate, optimizer)
            booster.backward(model(**mine).loss / accumulate, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        counted.append(book.elements["all_reduce", "dp"])
        scalars = book.elements["all_gather", "dp"] / plugin.mesh.size("dp")
        assert scalars <= 2 * accumulate + 2, "the sum and count of each loss, and a word on missing gradients"
    return counted, sum(p.numel() for p in model.unwrap().parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_data_parallel_gradients_travel_once_a_step(accumulate, precision):
    whole = sum(p.numel() for p in tiny_model("LT", vocab_size=VOCAB).parameters())
    for options in ({}, {"bucket_bytes": 1}, {"bucket_bytes": 10_000}):
        kwargs = options | {"precision": precision}
        for counted, elements in run_on_ranks(2, data_parallel_steps, HybridParallelPlugin, kwargs, accumulate):
            assert counted == [elements] * 3
            assert elements == whole


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_ddp_gradients_travel_once_a_step(accumulate, precision):
    for options in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.01}):
        kwargs = options | {"precision": precision}
        for counted, elements in run_on_ranks(2, data_parallel_steps, TorchDDPPlugin, kwargs, accumulate):
            assert counted == [elements] * 3


@on_ranks(2)
def test_only_the_backward_has_to_be_inside_no_sync():
    plugin = HybridParallelPlugin(precision="fp32")
    booster, model, optimizer = boosted("LT", plugin)
    loss = model(**batch(plugin.mesh.rank("dp"))).loss
    with colonnade.ledger() as book, booster.no_sync(model, optimizer):
        booster.backward(loss, optimizer)
    assert not book.calls


def test_under_tensor_and_data_parallelism_a_rank_sends_only_what_it_holds():
    wholes = sum(p.numel() for p in tiny_model("LT", vocab_size=VOCAB).parameters())
    for counted, elements in run_on_ranks(
        4, data_parallel_steps, HybridParallelPlugin, {"tp_size": 2, "precision": "fp32"}, 2
    ):
        assert counted == [elements] * 3
        assert elements < 0.6 * wholes


@on_ranks(2)
def test_micro_batches_of_a_global_batch_are_reduced_once():
    for plugin in (
        HybridParallelPlugin(precision="fp32", microbatch_size=1),
        TorchDDPPlugin(precision="fp32", microbatch_size=1),
    ):
        booster, model, optimizer = boosted("LL", plugin)
        elements = sum(p.numel() for p in model.unwrap().parameters())
        with colonnade.ledger() as book:
            booster.execute_pipeline(iter([batch(plugin.mesh.rank("dp"))]), model, None, optimizer)
        assert book.elements["all_reduce", "dp"] == elements


@on_ranks(2)
def test_a_ledger_counts_while_it_is_open_and_every_open_one_counts():
    _, model, _ = boosted("LL", HybridParallelPlugin(tp_size=2, precision="fp32"))
    once = 2 * 4 + 1
    model(**batch())
    with colonnade.ledger() as outer:
        assert not outer.calls
        model(**batch())
        with colonnade.ledger() as inner:
            model(**batch())
        model(**batch())
    model(**batch())
    assert inner.calls["all_reduce", "tp"] == once
    assert outer.calls["all_reduce", "tp"] == 3 * once
    assert outer.elements["all_reduce", "tp"] == 3 * inner.elements["all_reduce", "tp"]
    assert "all_reduce on tp: 9 calls" in repr(inner)
    with pytest.raises(ValueError), colonnade.ledger() as broken:
        raise ValueError
    model(**batch())
    assert not broken.calls, "an exception closes the ledger too"


@on_ranks(1)
def test_one_rank_communicates_nothing():
    booster, model, optimizer = boosted("LL", HybridParallelPlugin(precision="fp32"))
    with colonnade.ledger() as book:
        count_step(booster, model, optimizer)
    assert not book.calls
