"""Policies that nobody wrote: inferred from a model, checked on a twin, and then as right as a written one."""

import time

import pytest
import torch
from inferred_families import FAMILIES, build
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cluster.mesh import Axis
from colonnade.errors import PolicyError
from colonnade.shardformer import ModelSharder, ShardConfig, find_policy
from colonnade.shardformer.inference import infer_policy
from colonnade.testing.parity import assert_same_as_single
from colonnade.testing.ranks import on_ranks, run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

TWO = Axis("tp", 2, 0, (0, 1), None)  # enough to look at a policy; nothing is communicated


def train(family):
    batches = [{"input_ids": ids(4, 12, seed=s, vocab=67), "labels": ids(4, 12, seed=s, vocab=67)} for s in (7, 8)]
    return assert_same_as_single(
        lambda: build(family), batches, lambda: HybridParallelPlugin(tp_size=2, precision="fp32", max_norm=1.0), steps=3,
        max_norm=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_an_inferred_policy_trains_as_one_process_does(family):
    run_on_ranks(2, train, family)


def regions(family):
    """Row layer, without the block's number → its region in the last block that has it."""
    policy = infer_policy(build(family), TWO, check=False)
    return {".".join(p for p in r.row.path.split(".")[2:] if not p.isdigit()): r for r in policy.regions}


def names(paths):
    return {path.rpartition(".")[2] for path in paths}


def test_what_is_seen_of_a_model():
    phi3 = regions("phi3")
    attention, mlp = phi3["self_attn.o_proj"], phi3["mlp.down_proj"]
    assert [c.pieces for c in attention.columns] == [(32, 16, 16)] and attention.units == 2
    assert [c.pieces for c in mlp.columns] == [(48, 48)] and mlp.units is None
    assert names(regions("gpt_oss")["self_attn.o_proj"].sliced) == {"sinks"}
    assert names(regions("apertus")["mlp.down_proj"].shared) == {"alpha_n", "alpha_p"}
    gemma = regions("gemma3_text")["self_attn.o_proj"]
    assert {name.split(".")[-2] for name in gemma.shared} == {"q_norm", "k_norm"}


def test_what_stays_whole_has_its_reason():
    assert "k_norm.weight of shape (16,) spans" in regions("olmo2")["self_attn.o_proj"].reason
    assert "also feeds" in regions("deepseek_v3")["self_attn.o_proj"].reason
    assert not regions("olmo2")["mlp.down_proj"].reason


@pytest.mark.parametrize("name", ["LL", "qwen2", "qwen3", "mistral", "G2", "OP"])
def test_inference_finds_what_the_written_policies_say(name):
    found = []
    for choose in (find_policy, lambda model: infer_policy(model, TWO, check=False)):
        model = tiny_model(name)
        policy = choose(model)
        if choose is not find_policy:
            policy.attributes = 2
        sharder = ModelSharder(model, policy, ShardConfig(TWO))
        sharder.shard()
        layouts = {n: p.tensor_layout for n, p in model.named_parameters() if hasattr(p, "tensor_layout")}
        found.append(layouts)
    assert found[0] == found[1]


def test_a_large_model_is_read_without_weights_in_seconds():
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    started = time.process_time()
    policy = infer_policy(model, TWO, check=False)
    assert time.process_time() - started < 5
    assert len(policy.regions) == 64 and not any(r.reason for r in policy.regions)


class Doubling(LlamaForCausalLM):
    """Computes something else as soon as its layers are split."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        output = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
        if hasattr(self.lm_head, "axis") or hasattr(self.model.layers[0].mlp.down_proj, "axis"):
            output.loss = output.loss * 1.001
        return output


def refused():
    model = Doubling(tiny_model("LL").config)
    model.config.model_type = "doubling"
    with pytest.raises(PolicyError) as error:
        infer_policy(model, Axis.of(None))
    return str(error.value)


def test_a_policy_that_fails_its_check_is_refused_on_every_rank():
    first, second = run_on_ranks(2, refused)
    assert first == second and "computes what one process computes" in first and "the loss is" in first


def test_only_transformers_models_can_be_inferred():
    with pytest.raises(PolicyError, match="has to be written"):
        infer_policy(nn.Linear(2, 2), TWO)


@on_ranks(2)
def test_the_check_leaves_no_trace():
    model = build("cohere")
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    infer_policy(model, Axis.of(None))
    assert torch.get_rng_state().equal(state)
    assert all(p.equal(before[name]) for name, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
