"""What a rank holds: exactly its share of every parameter, gradient and optimizer state, and no byte beside it."""

from math import prod

import pytest
import torch

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.model.layout import layout_of
from colonnade.testing.ranks import on_ranks, run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

# by the end of a name: everything else is whole on every rank
SHARDED = {
    "LL": ("_proj.weight", "embed_tokens.weight", "lm_head.weight"),
    "LT": ("_proj.weight", "embed_tokens.weight"),
    "llama-gqa8": ("_proj.weight", "embed_tokens.weight", "lm_head.weight"),
    "qwen2": ("_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias", "embed_tokens.weight", "lm_head.weight"),
    "qwen3": ("_proj.weight", "embed_tokens.weight", "lm_head.weight"),
    "G2": ("c_attn.weight", "c_attn.bias", "c_fc.weight", "c_fc.bias", "c_proj.weight", "wte.weight"),
    "OP": ("_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias", "fc1.weight", "fc1.bias", "fc2.weight",
           "embed_tokens.weight"),
}  # fmt: skip


def trained(name, tp_size, precision="fp32", **overrides):
    """The user's model and the optimizer after one step, gradients still there."""
    model = tiny_model(name, **overrides)
    whole = {key: tuple(p.shape) for key, p in model.named_parameters()}
    booster = Booster(plugin=HybridParallelPlugin(tp_size=tp_size, precision=precision))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    x = ids(2, 12, 7 + booster.plugin.mesh.rank("dp"))
    booster.backward(model(input_ids=x, labels=x).loss, optimizer)
    optimizer.step()
    return model.unwrap(), optimizer, whole


def nbytes(tensor):
    """Bytes of the storage behind a tensor, which may be more than the tensor's own."""
    return tensor.untyped_storage().nbytes()


def shares(name, tp_size):
    model, optimizer, whole = trained(name, tp_size)
    mesh_axes = set()
    for key, parameter in model.named_parameters():
        layout = layout_of(parameter)
        sharded = key.endswith(SHARDED[name])
        assert layout.shape == whole[key], key
        assert layout.local_shape == tuple(parameter.shape), key
        assert sum(prod(box.extent) for box in layout.boxes) == parameter.numel(), f"{key} holds entries of no box"
        assert bool(layout.sharded_axes) == sharded, f"{key}: {layout}"
        mesh_axes |= set(layout.sharded_axes)
        share = prod(whole[key]) * 4 // (tp_size if sharded else 1)
        assert parameter.numel() * parameter.element_size() == share, key
        assert nbytes(parameter) == share, f"{key}: its storage is larger than it"
        assert parameter.grad.shape == parameter.shape
        assert nbytes(parameter.grad) == share, f"{key}: the gradient's storage is larger than it"
        state = optimizer.state[parameter]
        for moment in ("exp_avg", "exp_avg_sq"):
            assert nbytes(state[moment]) == share, f"{key}: {moment}"
    assert mesh_axes == {"tp"}
    assert len(optimizer.state) == len(whole), "no state for anything else"


@pytest.mark.parametrize("name", SHARDED)
def test_two_ranks_hold_exactly_half_of_what_is_split(name):
    run_on_ranks(2, shares, name, 2)


@pytest.mark.parametrize("name", ["llama-gqa8", "G2", "OP"])
def test_four_ranks_hold_exactly_a_quarter_of_what_is_split(name):
    run_on_ranks(4, shares, name, 4)


# configuration, and what each rank holds of a layer: rows of q_proj, of k_proj and v_proj, of gate_proj and up_proj
UNEVEN = {
    "2 key/value heads on 4 ranks": ({}, [(8, 8, 16)] * 4),
    "6 heads on 2 key/value heads, 4 ranks": (
        {"num_attention_heads": 6, "hidden_size": 48},
        [(16, 8, 16), (8, 8, 16), (16, 8, 16), (8, 8, 16)],
    ),
    "1 key/value head on 2 ranks, with biases": (
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
        [(16, 8, 32)] * 2,
    ),
    "9 heads on 3 key/value heads, 2 ranks": (
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
        [(48, 16, 32), (24, 8, 32)],
    ),
    "an odd width, 2 ranks": ({"intermediate_size": 37}, [(16, 8, 19), (16, 8, 18)]),
}


def bytes_of_uneven_shares(overrides, by_rank):
    """Bytes of all parameters, gradients and states of this rank; each of them is what the rank should hold."""
    queries, keys, width = by_rank[torch.distributed.get_rank()]
    model, optimizer, whole = trained("LL", len(by_rank), **overrides)
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": width, "up_proj": width}
    columns = {"o_proj": queries, "down_proj": width}
    held = 0
    for key, parameter in model.named_parameters():
        _, module, kind = (".." + key).rsplit(".", 2)
        shape = list(whole[key])
        if module in rows:
            shape[0] = rows[module]
        elif module in columns and kind == "weight":
            shape[1] = columns[module]
        elif module in ("embed_tokens", "lm_head"):
            shape[0] //= len(by_rank)
        assert tuple(parameter.shape) == layout_of(parameter).local_shape == tuple(shape), key
        state = optimizer.state[parameter]
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        assert [nbytes(tensor) for tensor in tensors] == [4 * prod(shape)] * 4, key
        held += sum(nbytes(tensor) for tensor in tensors)
    return held


@pytest.mark.parametrize("case", UNEVEN)
def test_uneven_and_shared_heads_take_exactly_the_bytes_of_their_layout(case):
    overrides, by_rank = UNEVEN[case]
    config = tiny_model("LL", **overrides).config
    found = run_on_ranks(len(by_rank), bytes_of_uneven_shares, overrides, by_rank)
    for (queries, keys, width), held in zip(by_rank, found):
        hidden, layers = config.hidden_size, config.num_hidden_layers
        cut = layers * (2 * queries + 2 * keys + 3 * width) * hidden + 2 * 64 // len(by_rank) * hidden
        biases = layers * (queries + 2 * keys + 2 * width + 2 * hidden) if config.attention_bias else 0
        assert held == 16 * (cut + biases + (2 * layers + 1) * hidden)


def of_an_odd_vocabulary():
    model, optimizer, _ = trained("LT", 2, vocab_size=67)
    weight = model.lm_head.weight
    assert weight is model.model.embed_tokens.weight
    assert nbytes(weight) == nbytes(weight.grad) == nbytes(optimizer.state[weight]["exp_avg"]) == weight.numel() * 4
    return weight.shape[0]


def test_an_odd_vocabulary_is_dealt_out_and_not_padded():
    assert run_on_ranks(2, of_an_odd_vocabulary) == [34, 33]


@on_ranks(4)
def test_data_parallel_ranks_hold_the_same_boxes_and_buckets_are_the_only_gradient_storage():
    model, _, whole = trained("LL", 2)
    parameters = list(model.parameters())
    assert all(nbytes(p) == p.numel() * 4 for p in parameters)
    buckets = {p.grad.untyped_storage().data_ptr(): nbytes(p.grad) for p in parameters}
    assert sum(buckets.values()) == sum(p.numel() * 4 for p in parameters)
    assert len(whole) == len(parameters)


@on_ranks(2)
def test_in_bf16_a_rank_holds_two_bytes_and_the_masters_its_share_of_four():
    model, optimizer, whole = trained("LL", 2, "bf16")
    for key, parameter in model.named_parameters():
        share = prod(whole[key]) // (2 if key.endswith(SHARDED["LL"]) else 1)
        assert parameter.dtype is parameter.grad.dtype is torch.bfloat16
        assert nbytes(parameter) == nbytes(parameter.grad) == 2 * share, key
        master = optimizer.stepped.master[parameter]
        assert master.dtype is torch.float32
        assert nbytes(master) == 4 * share, key
        for moment in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[parameter][moment].dtype is torch.float32
            assert nbytes(optimizer.state[parameter][moment]) == 4 * share, key


@on_ranks(2)
def test_a_frozen_parameter_is_cut_and_has_neither_gradient_nor_state():
    model = tiny_model("LL", num_hidden_layers=1)
    model.model.embed_tokens.requires_grad_(False)
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32"))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    booster.backward(model(input_ids=ids(2, 8), labels=ids(2, 8)).loss, optimizer)
    optimizer.step()
    weight = model.unwrap().model.embed_tokens.weight
    assert nbytes(weight) == 32 * 32 * 4
    assert weight.grad is None and weight not in optimizer.state
