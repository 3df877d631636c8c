"""`colonnade explain` says what the sharder does: held against really sharded models and the ledger."""

from __future__ import annotations

import json
import time
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, LlamaConfig

import colonnade
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cli.main import main
from colonnade.errors import ConfigError, PolicyError
from colonnade.model.twin import shrink, twin_model
from colonnade.shardformer import (
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
    col,
    method,
    replicate,
    row,
)
from colonnade.shardformer.policies.llama import HEADS, LlamaPolicy
from colonnade.testing.ranks import run_on_ranks
from colonnade.tools.explain.choice import find_config, load_policy
from colonnade.tools.explain.explanation import explain_config
from colonnade.tools.explain.text import plain_text, rich_tree
from colonnade.tools.explain.tree import Node, Traffic, fold

WRONG = Path(__file__).with_name("wrong_policies.py")
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def small(model_type, **fields):
    return shrink(AutoConfig.for_model(model_type, **fields))


def nodes(explanation):
    """Path of each node → the node; folded ones under the name of the line."""
    found = {}

    def add(node, path):
        found[path] = node
        for child in node.children:
            add(child, f"{path}.{child.name}".lstrip("."))

    add(explanation.tree, "")
    return found


def test_each_module_of_a_llama_is_told_with_its_reason():
    found = nodes(explain_config(LlamaConfig(**LLAMA_8B), 2))
    block = "model.layers.0–31"
    q, k = found[f"{block}.self_attn.q_proj"], found[f"{block}.self_attn.k_proj"]
    assert (q.kind, q.rule) == ("column", "LlamaAttention")
    assert "2,048 of 4,096 columns (16 of 32 num_attention_heads)" in q.why
    assert "entered once, for q_proj, k_proj and v_proj" in q.why
    assert q.traffic == (Traffic("all_reduce", "backward", per_token=4096),)
    assert "512 of 1,024 columns (4 of 8 num_key_value_heads); enters with q_proj" in k.why and not k.traffic
    assert (k.parameters, k.local_parameters) == (1024 * 4096, 512 * 4096)
    o = found[f"{block}.self_attn.o_proj"]
    assert o.kind == "row" and o.traffic == (Traffic("all_reduce", "forward", per_token=4096),)
    assert found[f"{block}.input_layernorm"].kind == "norm"
    assert found["model.embed_tokens"].kind == "vocabulary-parallel"
    assert "64,128 of 128,256 rows" in found["model.embed_tokens"].why
    head = found["lm_head"]
    assert head.kind == "vocabulary-parallel head" and "3 numbers a token" in head.why
    assert found[block].count == 32 and found[block].native == "LlamaDecoderLayer"


def test_eight_billion_parameters_take_no_memory_and_little_time():
    start = time.process_time()
    explanation = explain_config(LlamaConfig(**LLAMA_8B), 8)
    assert time.process_time() - start < 5
    assert explanation.tree.total == 8_030_261_248
    assert explanation.formula == "4·32 + 2 = 130"
    assert explanation.all_reduces == 130 and explanation.hidden == 4096
    norms = 65 * 4096
    assert explanation.tree.local_total == (8_030_261_248 - norms) // 8 + norms


def test_tied_weights_are_counted_once_and_said():
    found = nodes(explain_config(small("gpt2"), 2))
    assert "shares the weight of transformer.wte" in found["lm_head"].why
    assert found["lm_head"].parameters == 0
    assert found["transformer.wte"].local_parameters == 34 * 64  # of 67 rows, rank 0 holds one more


def test_fused_parts_and_shrunk_attributes_are_told():
    found = nodes(explain_config(small("gpt2"), 2))
    fused = found["transformer.h.0–1.attn.c_attn"]
    assert fused.kind == "column, fused" and "3 fused parts each by itself" in fused.why
    attention = found["transformer.h.0–1.attn"]
    assert attention.kind == "attributes" and "split_size 64 → 32" in attention.why
    assert "the bias is added once, after the sum" in found["transformer.h.0–1.mlp.c_proj"].why


def test_what_no_rule_is_about_is_replicated():
    found = nodes(explain_config(small("gpt2"), 2))
    wpe = found["transformer.wpe"]
    assert (wpe.kind, wpe.rule) == ("replicated", None)
    assert "no rule" in wpe.why and wpe.parameters == wpe.local_parameters


def test_norms_inside_the_heads_sum_their_gradient():
    explanation = explain_config(small("qwen3"), 2)
    norm = nodes(explanation)["model.layers.0–1.self_attn.q_norm"]
    assert norm.kind == "head norm" and norm.traffic == (Traffic("all_reduce", "backward", fixed=16),)
    assert explanation.formula == "4·2 + 2 = 10"
    assert explanation.other_traffic[norm.traffic[0]] == 4
    assert explanation.calls()["all_reduce"] == 14


def test_one_rank_splits_nothing_and_says_so():
    explanation = explain_config(small("bloom"), 1)  # no policy is needed either
    assert explanation.tree.total == explanation.tree.local_total
    assert not explanation.calls() and explanation.policy_source == "nothing to do"
    assert "none over tp" in plain_text(explanation, "")


class Everything(LlamaPolicy):
    """Uses the words that the families do not."""

    def module_policy(self):
        mlp = col("gate_proj", gather=True) + method("extra_repr", lambda self: "", because="nothing")
        attention = col("q_proj", "k_proj", "v_proj", units=HEADS) + row("o_proj", units=HEADS)
        return {"LlamaAttention": attention, "LlamaMLP": mlp + replicate("act_fn"), "LlamaModel": replicate("norm")}


def test_a_policy_of_ones_own_is_told_as_such():
    explanation = explain_config(small("llama"), 2, Everything())
    found = nodes(explanation)
    assert explanation.policy == "Everything" and "given by you" in explanation.policy_source
    gate = found["model.layers.0–1.mlp.gate_proj"]
    assert "collected on every rank" in gate.why
    assert [t.operation for t in gate.traffic] == ["all_reduce", "all_gather"]
    assert found["model.norm"].why == "the policy leaves it whole on every rank"
    assert "method extra_repr is replaced" in found["model.layers.0–1.mlp"].why
    assert found["model.layers.0–1.mlp.up_proj"].kind == "replicated"


class Halved(torch.nn.Linear):
    """A layer that nobody here knows.

    Traffic: none at all.
    """

    @classmethod
    def from_native_module(cls, module, process_group=None):
        module.__class__ = cls
        return module


class Unknown(Policy):
    def module_policy(self):
        rule = SubModuleReplacementDescription("down_proj", Halved)
        return {"LlamaMLP": ModulePolicyDescription(sub_module_replacement=[rule])}


def test_a_layer_that_is_not_known_speaks_for_itself():
    node = nodes(explain_config(small("llama"), 2, Unknown()))["model.layers.0–1.mlp.down_proj"]
    assert node.kind == "Halved"
    assert node.why == "A layer that nobody here knows. Traffic: none at all."


def test_layers_that_differ_are_not_folded():
    layers = [Node(str(i), "Layer", kind="row" if i == 2 else "column") for i in range(6)]
    folded = fold([*layers, Node("norm", "Norm")])
    assert [(n.name, n.count) for n in folded] == [("0–1", 2), ("2", 1), ("3–5", 3), ("norm", 1)]


def counted(model_type, tp=2, fields=None):
    """What a step really communicates over tp, and the parameters that the rank really holds."""
    model = twin_model(configured(model_type, fields))
    booster = Booster(plugin=HybridParallelPlugin(tp_size=tp, precision="fp32"))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.randint(3, 60, (3, 10), generator=torch.Generator().manual_seed(0))
    with colonnade.ledger() as book:
        booster.backward(model(input_ids=ids, labels=ids).loss, optimizer)
    held = sum(p.numel() for p in model.parameters())
    return {op: (n, book.elements[op, axis]) for (op, axis), n in book.calls.items() if axis == "tp"}, held


def told_of(explanation):
    """Calls and elements of each operation in a step of 3 rows of 10 tokens."""
    told = {}
    for traffic, times in explanation.tree.messages():
        calls, elements = told.get(traffic.operation, (0, 0))
        size = traffic.per_token * 3 * 10 + traffic.fixed
        told[traffic.operation] = (calls + times, elements + times * size)
    return told


def configured(model_type, fields):
    """A small configuration; one with `fields` keeps these."""
    config = small(model_type)
    for name, value in (fields or {}).items():
        setattr(config, name, value)
    return config


WRITTEN = ["llama", "mistral", "qwen2", "qwen3", "gpt2", "opt"]
INFERRED = ["gemma3_text", "deepseek_v3", "olmo2", "bloom", "bert", "qwen3_next"]


@pytest.mark.parametrize("model_type", [*WRITTEN, *INFERRED])
def test_calls_elements_and_parameters_are_those_of_a_real_step(model_type):
    explanation = explain_config(small(model_type), 2)
    (real, held), _ = run_on_ranks(2, counted, model_type)
    assert told_of(explanation) == real
    assert explanation.tree.local_total == explanation.fullest == held
    assert not explanation.uneven


def heads(queries, keys):
    return {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": 8, "hidden_size": 8 * queries}


@pytest.mark.parametrize(
    ("model_type", "tp", "fields"),
    [
        ("llama", 2, heads(9, 3)),
        ("llama", 2, heads(4, 1)),
        ("llama", 4, heads(6, 2) | {"attention_bias": True}),
        ("llama", 3, heads(6, 2)),
        ("qwen2", 4, heads(8, 2)),
        ("qwen3", 2, heads(4, 1)),
        ("gemma3_text", 4, heads(4, 2)),
        ("olmo2", 4, heads(8, 2)),
    ],
)
def test_what_is_told_of_uneven_and_shared_heads_is_what_happens(model_type, tp, fields):
    explanation = explain_config(configured(model_type, fields), tp)
    by_rank = run_on_ranks(tp, counted, model_type, tp, fields)
    for real, _ in by_rank:
        assert told_of(explanation) == real
    assert explanation.tree.local_total == by_rank[0][1]
    assert explanation.fullest == max(held for _, held in by_rank)


def test_heads_that_several_ranks_hold_are_told():
    explanation = explain_config(LlamaConfig(**LLAMA_8B | {"num_key_value_heads": 2}), 8)
    found = nodes(explanation)
    k, q = found["model.layers.0–31.self_attn.k_proj"], found["model.layers.0–31.self_attn.q_proj"]
    assert "128 of 256 columns (1 of 2 num_key_value_heads)" in k.why
    assert k.why.endswith("held by 4 ranks, gradient summed")
    assert k.traffic == (Traffic("all_reduce", "backward", fixed=2 * 128 * 4096),)
    assert "(4 of 32 num_attention_heads)" in q.why and "held by" not in q.why
    assert explanation.formula == "4·32 + 2 = 130", "the sums of shared gradients are counted apart"
    assert explanation.other_traffic[k.traffic[0]] == 64
    assert "and 64 × backward all-reduce of 1048576 elements" in plain_text(explanation, "")
    assert not explanation.uneven


def test_the_memory_is_that_of_the_fullest_rank():
    """Six query heads on two key/value heads, three ranks: 2 + 1 + 3."""
    explanation = explain_config(configured("llama", heads(6, 2)), 3)
    text = plain_text(explanation, "")
    assert explanation.fullest > explanation.tree.local_total
    assert f"{explanation.tree.local_total:,} on rank 0" in text and f", {explanation.fullest:,} on the fullest" in text
    assert explanation.to_json()["totals"]["local_fp32_bytes"] == 4 * explanation.fullest
    assert "num_attention_heads 6 = 2 + 1 + 3" in text and "shares LlamaForCausalLM out unevenly" in text


def test_a_fused_layer_says_which_of_its_parts_are_shared():
    class Fused(Policy):
        def module_policy(self):
            return {"LlamaMLP": col("up_proj", pieces=(16, 24, 24), units=2, heads=(4, None, None))}

    explanation = explain_config(configured("llama", {"intermediate_size": 64}), 4, Fused())
    up = nodes(explanation)["model.layers.0–1.mlp.up_proj"]
    assert "28 of 64 columns (1 of 4 heads), 3 fused parts each by itself" in up.why
    assert "parts 2 and 3 of 3 held by 2 ranks, gradient summed" in up.why
    assert up.traffic[1] == Traffic("all_reduce", "backward", fixed=2 * (12 + 12) * 64)


def test_a_rank_that_would_hold_nothing_is_refused_with_the_sharders_words():
    with pytest.raises(ConfigError, match=r"tp_size=33 does not fit LlamaForCausalLM"):
        explain_config(LlamaConfig(**LLAMA_8B), 33)


@pytest.mark.parametrize("form", ["folder", "file"])
def test_a_model_is_a_folder_or_a_config_file(tmp_path, form, capsys):
    LlamaConfig(**LLAMA_8B).save_pretrained(tmp_path)
    assert main(["explain", str(tmp_path if form == "folder" else tmp_path / "config.json"), "--tp", "4"]) == 0
    out = capsys.readouterr().out
    assert "4·32 + 2 = 130 all-reduces of b·s·h, h = 4096" in out
    assert "policy LlamaPolicy: the family's own, colonnade/shardformer/policies/llama.py" in out
    assert "layers.0–31  LlamaDecoderLayer" in out
    assert "7.5 GiB weights in fp32, 29.9 GiB with gradients and Adam's state" in out


def test_json_holds_the_tree_and_the_totals(capsys):
    assert main(["explain", "gpt2", "--tp", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["policy"]["name"] == "GPT2Policy" and told["tp"] == 2
    assert told["totals"]["all_reduce_formula"] == "4·2 + 2 = 10"
    assert told["totals"]["local_adam_bytes"] == 4 * told["totals"]["local_fp32_bytes"]
    blocks = told["tree"]["children"][0]["children"]
    assert [b["count"] for b in blocks if b["name"] == "h.0–1"] == [2]


def test_a_terminal_gets_a_tree_with_the_same_content():
    explanation = explain_config(small("llama"), 2)
    console = Console(file=StringIO(), force_terminal=True, width=300)
    console.print(rich_tree(explanation, "sizes"))
    drawn = console.file.getvalue()
    assert "q_proj" in drawn and "\x1b[" in drawn and "4·2 + 2 = 10" in drawn


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lama"], "there is no model 'lama'"),
        (["llama", "--tp", "0"], "at least 1 process"),
        (["llama", "--policy", "x"], "another form than module:Class"),
        (["llama", "--policy", "no_such_module:X"], "cannot be imported"),
        (["llama", "--policy", f"{WRONG}:Nothing"], "there is no policy 'Nothing'"),
        (["llama", "--policy", f"{WRONG}:Misspelled"], 'LlamaAttention has no "q_prj"'),
        (["gpt2", "--policy", f"{WRONG}:RightLlama"], "the model's type is 'gpt2'"),
    ],
)
def test_mistakes_are_explained(capsys, arguments, said):
    assert main(["explain", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_a_model_and_a_broken_file_are_explained(tmp_path, capsys):
    assert main(["explain", str(tmp_path)]) == 2
    assert "holds no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["explain", str(tmp_path)]) == 2
    assert "cannot read the configuration" in capsys.readouterr().err


def test_a_policy_is_found_by_module_and_by_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(WRONG.parent))
    assert type(load_policy("wrong_policies:RightLlama")).__name__ == "RightLlama"
    assert type(load_policy(f"{WRONG}:RightLlama")).__name__ == "RightLlama"
    assert load_policy(None) is None
    with pytest.raises(PolicyError, match="RightLlama, KeysCutOtherwise"):
        load_policy(f"{WRONG}:BiasOnEachRank")


def test_the_source_of_the_sizes_is_told(tmp_path):
    assert "only the type 'llama' was given" in find_config("llama").source
    LlamaConfig(**LLAMA_8B).save_pretrained(tmp_path)
    assert find_config(str(tmp_path)).source == f"sizes of {tmp_path}"
    assert find_config(str(tmp_path)).config.hidden_size == 4096


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    assert "colonnade explain llama --tp 2" in capsys.readouterr().out
