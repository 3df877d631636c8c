"""Policies that nobody wrote: inferred from a model, checked on a twin, and then as right as a written one."""

import logging
import sys
import time
from pathlib import Path

import pytest
import torch
from inferred_families import build
from models_of_our_own import own_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from colonnade.cluster.mesh import Axis
from colonnade.errors import PolicyError
from colonnade.shardformer import ModelSharder, ShardConfig, find_policy
from colonnade.shardformer.inference import infer, infer_policy
from colonnade.testing.ranks import on_ranks, run_on_ranks
from colonnade.testing.tiny import tiny_model

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from model_cases import Case  # noqa: E402 - the page of all models is made by these
from model_look import Twin, look_at  # noqa: E402

CHOOSE = infer._choose
TWO = Axis("tp", 2, 0, (0, 1), None)  # enough to look at a policy; nothing is communicated


# A part of what docs/models.md lists, one for each kind of structure: (family, class, fields) → regions that are split.
PART: dict[str, tuple[str, str, dict]] = {
    "norms of 1 + weight, capped logits": ("gemma2", "Gemma2ForCausalLM", {}),
    "norms per head, a scaled embedding": ("gemma3_text", "Gemma3ForCausalLM", {}),
    "fused qkv of unequal parts, gate and up": ("phi3", "Phi3ForCausalLM", {"num_key_value_heads": 8}),
    "queries and keys with a norm": ("phi", "PhiForCausalLM", {"qk_layernorm": True}),
    "a norm for each head": ("cohere", "CohereForCausalLM", {"use_qk_norm": True}),
    "a norm over all heads": ("olmo2", "Olmo2ForCausalLM", {}),
    "clipped in place": ("olmo", "OlmoForCausalLM", {"clip_qkv": 1.0}),
    "qkv fused head by head": ("gpt_neox", "GPTNeoXForCausalLM", {}),
    "qkv fused in four parts": ("codegen", "CodeGenForCausalLM", {}),
    "a head bias, one norm for both": ("gptj", "GPTJForCausalLM", {}),
    "parameters in the activation": ("apertus", "ApertusForCausalLM", {}),
    "sinks per head, experts": ("gpt_oss", "GptOssForCausalLM", {}),
    "low-rank attention": ("deepseek_v3", "DeepseekV3ForCausalLM", {}),
    "low-rank keys alone": ("deepseek_v2", "DeepseekV2ForCausalLM", {"q_lora_rank": None}),
    "biases by distance, for all heads": ("bloom", "BloomForCausalLM", {}),
    "one key for all heads, biases by distance": ("falcon", "FalconForCausalLM", {"alibi": True}),
    "qkv in heads of 3": ("falcon", "FalconForCausalLM", {"multi_query": False, "num_attention_heads": 64, "hidden_size": 4096}),
    "heads that do not divide": ("smollm3", "SmolLM3ForCausalLM", {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "a parallel residual": ("gpt_neo", "GPTNeoForCausalLM", {}),
    "parts in several modules, a tied bias": ("bert", "BertLMHeadModel", {}),
    "a decoder that attends to an encoder": ("bart", "BartForCausalLM", {}),
    "sound": ("whisper", "WhisperForConditionalGeneration", {}),
    "pictures": ("vit", "ViTForImageClassification", {"num_labels": 5}),
}  # fmt: skip


def look(family, kind, fields):
    return look_at(Case(family, kind, changes=fields))


@pytest.mark.parametrize("structure", PART)
def test_an_inferred_policy_trains_as_one_process_does(structure):
    row = run_on_ranks(2, look, *PART[structure])[0]
    assert row.proved and row.policy == "inferred", row.remark
    assert row.regions[0] == row.regions[1] > 0, row.remark
    assert row.vocabulary in ("split", ""), row.remark


def regions(family):
    """Row layer, without the block's number → its region in the last block that has it."""
    policy = infer_policy(build(family), TWO, check=False)
    return {".".join(p for p in r.row.path.split(".")[2:] if not p.isdigit()): r for r in policy.regions}


def names(paths):
    return {path.rpartition(".")[2] for path in paths}


def places(region):
    """What becomes of the parameters and buffers inside; a norm's under the norm's name."""
    return {(place.name.removesuffix(".weight").rpartition(".")[2], place.kind) for place in region.places}


def test_what_is_seen_of_a_model():
    phi3 = regions("phi3")
    attention, mlp = phi3["self_attn.o_proj"], phi3["mlp.down_proj"]
    assert [c.pieces for c in attention.columns] == [(32, 16, 16)] and attention.units == 2
    assert [c.pieces for c in mlp.columns] == [(48, 48)] and mlp.units is None
    assert places(regions("gpt_oss")["self_attn.o_proj"]) == {("sinks", "cut")}
    assert places(regions("apertus")["mlp.down_proj"]) == {("alpha_n", "whole"), ("alpha_p", "whole")}
    assert places(regions("gemma3_text")["self_attn.o_proj"]) == {("q_norm", "whole"), ("k_norm", "whole")}
    assert places(regions("olmo2")["self_attn.o_proj"]) == {("q_norm", "norm"), ("k_norm", "norm")}
    assert names(c.path for c in regions("deepseek_v3")["self_attn.o_proj"].latents) == {"kv_a_proj_with_mqa"}
    bloom = regions("bloom")["self_attention.dense"]
    assert [(a.name, a.dim, a.folded) for a in bloom.arguments] == [("alibi", 0, True)]


def test_what_stays_whole_has_its_reason():
    bamba = Twin(Case("bamba", "BambaForCausalLM"), 2).model()
    reasons = {r.row.path.rpartition(".")[2]: r.reason for r in infer_policy(bamba, TWO, check=False).regions}
    assert "conv1d.weight" in reasons["out_proj"] and "spans what would be split" in reasons["out_proj"]
    assert not reasons["down_proj"]


def spine(family):
    found = infer_policy(build(family), TWO, check=False).spine
    return found.base, found.embed, found.blocks, found.norm, found.head


def test_the_spine_of_a_model_is_found_by_the_order_of_its_calls():
    assert spine("phi3") == ("model", ("embed_tokens",), "layers", "norm", "lm_head")
    assert spine("gpt_neox") == ("gpt_neox", ("embed_in",), "layers", "final_layer_norm", "lm_head")
    bloom = ("word_embeddings", "word_embeddings_layernorm")
    assert spine("bloom") == ("transformer", bloom, "h", "ln_f", "lm_head")
    assert spine("bert") == ("bert", ("embeddings",), "encoder.layer", None, "cls.predictions.decoder")


@pytest.mark.parametrize("name", ["LL", "G2", "OP"])
def test_the_spine_found_is_the_spine_written(name):
    model = tiny_model(name)
    written, found = find_policy(model).spine, infer_policy(model, TWO, check=False).spine
    assert found.blocks_of(model) is written.blocks_of(model)
    assert found.embeds_of(model) == written.embeds_of(model)
    assert found.norm_of(model) is written.norm_of(model) is not None
    assert found.head_of(model) is written.head_of(model) is not None


@pytest.mark.parametrize("name", ["LL", "qwen2", "qwen3", "mistral", "G2", "OP"])
def test_inference_finds_what_the_written_policies_say(name):
    found = []
    for choose in (find_policy, lambda model: infer_policy(model, TWO, check=False)):
        model = tiny_model(name)
        policy = choose(model)
        if choose is not find_policy:
            policy.levels = dict.fromkeys(policy.levels, 2)
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


class Wavering(LlamaForCausalLM):
    """Computes something else at every call."""

    calls = 0

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        output = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
        Wavering.calls += 1
        if output.loss is not None:
            output.loss = output.loss * (1 + 0.001 * Wavering.calls)
        return output


class Doubling(LlamaForCausalLM):
    """Computes something else as soon as its MLP is split."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        output = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
        if hasattr(self.model.layers[0].mlp.down_proj, "axis") and output.loss is not None:
            output.loss = output.loss * 1.001
        return output


def own_family(kind):
    model = kind(tiny_model("LL").config)
    model.config.model_type = kind.__name__.lower()
    return model


def refused():
    with pytest.raises(PolicyError) as error:
        infer_policy(own_family(Wavering), Axis.of(None))
    return str(error.value)


def test_a_model_that_fails_its_check_is_refused_on_every_rank():
    first, second = run_on_ranks(2, refused)
    assert first == second and "computes what one process computes" in first and "the loss is" in first


def reasons_of_doubling():
    return {(r.pattern.rpartition(".")[2], r.reason) for r in infer_policy(own_family(Doubling), Axis.of(None)).regions}


def test_a_region_that_fails_its_check_stays_whole_on_every_rank():
    first, second = map(dict, run_on_ranks(2, reasons_of_doubling))
    assert first == second and not first["o_proj"]
    assert "its twin fails: the loss is" in first["down_proj"]


def surprised(*_):
    raise ZeroDivisionError("of the first rank")


def told_of_a_surprise():
    """What a rank hears where the search of the first one ends in something that nobody has foreseen."""
    infer._choose = surprised
    try:
        with pytest.raises((ZeroDivisionError, PolicyError)) as error:
            infer_policy(own_family(Doubling), Axis.of(None))
    finally:
        infer._choose = CHOOSE
    return error.typename, str(error.value)


def test_no_rank_waits_for_a_search_that_has_failed():
    started = time.monotonic()
    first, second = run_on_ranks(2, told_of_a_surprise)
    assert time.monotonic() - started < 10
    assert first == ("ZeroDivisionError", "of the first rank")
    assert second == ("PolicyError", "the search failed: ZeroDivisionError: of the first rank")


class OneMaskForAll(LlamaForCausalLM):
    """Split, it gives every row the mask of the last one."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        if hasattr(self.model.layers[0].mlp.down_proj, "axis") and attention_mask is not None:
            attention_mask = attention_mask[-1:].expand_as(attention_mask)
        return super().forward(input_ids, attention_mask, labels=labels, **kwargs)


def test_rows_of_the_check_have_different_masks():
    policy = infer_policy(own_family(OneMaskForAll), TWO)
    assert policy.refused.keys() >= {"model.layers.*.mlp.down_proj"}
    assert "model.layers.*.mlp.down_proj" not in policy.levels


def test_what_is_said_of_the_vocabulary(caplog):
    logger = logging.getLogger(infer.__name__)
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger.name):  # the commands quieten this logger for their whole process
            infer_policy(own_model("grouped"), TWO)
            infer_policy(build("cohere"), TWO)
    finally:
        logger.removeHandler(caplog.handler)
    plain, cohere = (record.getMessage() for record in caplog.records)
    assert "vocabulary whole: there is none, or the model has no get_input_embeddings()" in plain
    assert "vocabulary split" in cohere


def test_what_takes_no_token_ids_cannot_be_inferred():
    with pytest.raises(PolicyError, match="its forward does not run"):
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
