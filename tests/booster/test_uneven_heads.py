"""Heads that do not divide, and key/value heads fewer than ranks: the numbers of one process, nothing refused but nothing."""

import logging

import pytest
import torch
from parity_runs import MAX_NORM, run, run_each, unequal

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cluster.mesh import Axis
from colonnade.errors import ConfigError
from colonnade.model.layout import layout_of
from colonnade.shardformer import ShardConfig, ShardFormer
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import tiny_model

SHAPES = {  # query heads, key/value heads
    "9 on 3, as SmolLM2": (9, 3),
    "6 on 6": (6, 6),
    "5 on 1": (5, 1),
    "6 on 2": (6, 2),
    "12 on 3": (12, 3),
    "4 on 1": (4, 1),
    "4 on 2": (4, 2),
}


def shape(heads, keys, **more):
    return {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": 8, "hidden_size": 8 * heads} | more


@pytest.mark.parametrize("tp", [2, 4])
def test_llama_with_any_number_of_heads(tp):
    cases = {
        label: {"name": "LL", "batches": unequal(), "overrides": shape(*numbers), "max_norm": MAX_NORM, "steps": 2}
        for label, numbers in SHAPES.items()
    }
    run_on_ranks(tp, run_each, f"tp {tp}", cases)


def test_other_families_with_uneven_heads():
    cases = {
        "qwen3, head norms": {"name": "qwen3", "overrides": shape(5, 1)},
        "qwen2, biases": {"name": "qwen2", "overrides": shape(6, 2)},
        "mistral, eager": {"name": "mistral", "overrides": shape(9, 3, attn_implementation="eager")},
        "gpt2": {"name": "G2", "overrides": {"n_head": 5, "n_embd": 40, "n_inner": 37}},
        "opt": {"name": "OP", "overrides": {"num_attention_heads": 5, "hidden_size": 40, "ffn_dim": 37}},
        "llama, an odd width and biases": {
            "name": "LL", "overrides": shape(6, 3, intermediate_size=37, attention_bias=True, mlp_bias=True),
        },
    }  # fmt: skip
    rest = {"batches": unequal(), "max_norm": MAX_NORM, "steps": 2}
    run_on_ranks(4, run_each, "tp 4", {label: case | rest for label, case in cases.items()})


def test_with_data_parallel_ranks_beside():
    run_on_ranks(4, run, "tp 2 × dp 2", "LL", unequal(), overrides=shape(4, 1), max_norm=MAX_NORM)
    run_on_ranks(4, run, "tp 2 × dp 2", "qwen3", unequal(), overrides=shape(5, 5), max_norm=MAX_NORM)


def on_axis(size, rank=0):
    """An axis to prepare a model for; nothing is sent over it."""
    return Axis("tp", size, rank, tuple(range(size)), None)


def prepared(tp, **overrides):
    with torch.device("meta"):
        model = tiny_model("LL", **overrides)
    return ShardFormer(ShardConfig(on_axis(tp))).prepare(model)


def test_unequal_shares_are_named_with_the_sizes_that_are_even():
    text = prepared(2, **shape(9, 3)).uneven
    assert text.startswith("tp_size=2 shares LlamaForCausalLM out unevenly")
    assert "num_attention_heads 9 = 6 + 3   (model.layers.*.self_attn.q_proj, model.layers.*.self_attn.o_proj)" in text
    assert "33% over the mean" in text
    assert text.splitlines()[-1].split() == ["even", "tp_size=1", "or", "3"]
    assert "2 + 1 + 3" in prepared(3, **shape(6, 2)).uneven, (
        "query heads of one block go to the ranks that hold its key"
    )


def test_what_is_even_or_nearly_so_is_not_worth_a_line():
    assert not prepared(2, **shape(4, 1)).uneven, "both ranks hold the one key/value head"
    assert not prepared(2, intermediate_size=63).uneven  # 32 + 31


def warnings_of_boost():
    """What the process writes to the log while a model of 9 heads is boosted."""
    heard = []
    logger = logging.getLogger("colonnade.shardformer.shard.sharder")
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: heard.append(record.getMessage())
    try:
        Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32")).boost(tiny_model("LL", **shape(9, 3)))
    finally:
        logger.removeHandler(handler)
    return heard


def test_the_first_rank_says_once_that_shares_are_unequal():
    first, second = run_on_ranks(2, warnings_of_boost)
    assert len(first) == 1 and "num_attention_heads 9 = 6 + 3" in first[0]
    assert not second


def test_a_rank_that_would_hold_nothing_is_refused():
    with pytest.raises(ConfigError) as caught:
        prepared(4, **shape(3, 1))
    assert "num_attention_heads  3 for 4 ranks" in str(caught.value)
    assert "tp_size=3 or less" in str(caught.value)


def held():
    """Layout and gradient of the key projection of a model with one key/value head, on a rank."""
    axis = Axis.of(None)
    model, _ = ShardFormer(ShardConfig(axis)).optimize(tiny_model("LL", **shape(6, 2)))
    key = model.model.layers[0].self_attn.k_proj.weight
    query = model.model.layers[0].self_attn.q_proj.weight
    return [tuple((b.logical[0], b.extent[0], b.holders) for b in layout_of(p).boxes) for p in (key, query)]


def test_which_rank_holds_what():
    first, second, third, fourth = run_on_ranks(4, held)
    assert first == [((0, 8, (0, 1)),), ((0, 16, ()),)]
    assert second == [((0, 8, (0, 1)),), ((16, 8, ()),)]
    assert third == [((8, 8, (2, 3)),), ((24, 16, ()),)]
    assert fourth == [((8, 8, (2, 3)),), ((40, 8, ()),)]
