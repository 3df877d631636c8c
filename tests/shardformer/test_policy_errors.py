"""What a person reads whose policy or whose sizes do not fit the model; and that the model is then as it was.

No ranks are needed for most of it: everything is found before the first collective.
"""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, PretrainedConfig

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cluster.mesh import Axis
from colonnade.errors import ConfigError, PolicyError
from colonnade.model.layout import has_layout
from colonnade.shardformer import (
    ModulePolicyDescription,
    Policy,
    ShardConfig,
    ShardFormer,
    SubModuleReplacementDescription,
    col,
    find_policy,
    known_families,
    norm,
    row,
    shrink,
    vocab_embedding,
)
from colonnade.shardformer.layer import Linear1D_Col
from colonnade.shardformer.policies.llama import LlamaPolicy
from colonnade.testing.ranks import on_ranks
from colonnade.testing.tiny import tiny_model


def over(size):
    """A ShardConfig as the first of `size` ranks sees it, without the ranks: nothing may be sent before the error."""
    return ShardConfig(tensor_parallel_process_group=Axis("tp", size, 0, tuple(range(size)), None))


def llama_policy(**rules):
    """Llama's policy with the given rules in the place of its own."""

    class Changed(LlamaPolicy):
        def module_policy(self):
            return {key: rule for key, rule in (super().module_policy() | rules).items() if rule is not None}

    return Changed()


def fingerprint(model):
    """Everything that sharding changes: classes, values, shapes and layouts."""
    modules = {name: type(module) for name, module in model.named_modules()}
    weights = {name: (id(p), p.detach().clone(), has_layout(p)) for name, p in model.named_parameters()}
    return modules, weights, str(model.config), model.loss_function


def assert_untouched(model, before):
    after = fingerprint(model)
    assert after[0] == before[0], "a module has been replaced"
    assert after[2:] == before[2:]
    for name, (identity, value, laid_out) in before[1].items():
        now = after[1][name]
        assert now[0] == identity and now[1].equal(value) and now[2] == laid_out, f"{name} has been changed"


def refused(error, model, policy, config=None):
    """The text of the error, after checking that the model is as it was."""
    before = fingerprint(model)
    with pytest.raises(error) as caught:
        ShardFormer(config or over(2)).optimize(model, policy)
    assert_untouched(model, before)
    return str(caught.value)


def llama(**overrides):
    return tiny_model("LL", num_hidden_layers=2, **overrides)


def test_a_rule_for_a_class_the_model_does_not_have():
    text = refused(PolicyError, llama(), llama_policy(LlamaMPL=col("up_proj")))
    assert text.startswith("Changed does not fit LlamaForCausalLM.")
    assert 'LlamaMPL matches no module (did you mean "LlamaMLP"?)' in text
    assert "LlamaAttention" in text and "LlamaDecoderLayer" in text


def test_a_rule_by_class_for_a_class_the_model_does_not_have():
    class ForBert(LlamaPolicy):
        def module_policy(self):
            return super().module_policy() | {nn.Conv2d: ModulePolicyDescription()}

    assert "Conv2d matches no module" in refused(PolicyError, llama(), ForBert())


def test_a_sub_module_that_is_misspelt():
    text = refused(PolicyError, llama(), llama_policy(LlamaMLP=col("gate_projj", "up_proj") + row("down_proj")))
    assert 'LlamaMLP has no "gate_projj" (did you mean "gate_proj"?)' in text
    assert "it has gate_proj, up_proj, down_proj, act_fn" in text
    assert text.count("gate_projj") == 1, "said once, not once for each layer"


def test_a_misspelt_path():
    rule = ModulePolicyDescription(sub_module_replacement=[SubModuleReplacementDescription("mlp.up_prj", Linear1D_Col)])
    text = refused(PolicyError, llama(), llama_policy(LlamaDecoderLayer=rule))
    assert 'LlamaDecoderLayer has no "mlp.up_prj"' in text
    assert "up_proj" in text.split('"mlp.up_prj"', 1)[1], "the suggestion reaches the module that the path leads to"


def test_a_sub_module_that_is_no_module():
    text = refused(PolicyError, llama(), llama_policy(LlamaAttention=col("head_dim")))
    assert 'LlamaAttention has no "head_dim"' in text


def test_a_module_that_is_named_twice():
    twice = norm("input_layernorm", "post_attention_layernorm") + col("mlp.up_proj")
    text = refused(PolicyError, llama(), llama_policy(LlamaDecoderLayer=twice))
    assert "model.layers.0.mlp.up_proj is replaced twice, first as model.layers.0.mlp.up_proj" in text
    text = refused(
        PolicyError, llama(), llama_policy(LlamaMLP=col("up_proj", "gate_proj", "up_proj") + row("down_proj"))
    )
    assert "model.layers.1.mlp.up_proj is replaced twice" in text


def test_all_problems_of_a_policy_come_together():
    policy = llama_policy(LlamaMPL=col("x"), LlamaMLP=col("gat_proj"), LlamaModel=vocab_embedding("embed_token"))
    text = refused(PolicyError, llama(), policy)
    for said in ('"LlamaMLP"?', '"gate_proj"?', '"embed_tokens"?'):
        assert said in text
    assert len([line for line in text.splitlines() if line.startswith("  rule")]) == 3


def test_a_config_number_that_does_not_exist():
    text = refused(PolicyError, llama(), llama_policy(LlamaMLP=col("up_proj", units="num_groups")))
    assert "the policy counts by 'num_groups', which is no whole number in the config of LlamaForCausalLM" in text


def tied_without_head():
    return tiny_model("LT", num_hidden_layers=1), llama_policy(LlamaForCausalLM=None)


def test_a_tied_head_that_is_left_out_of_the_policy():
    model, policy = tied_without_head()
    with pytest.raises(PolicyError) as caught:
        ShardFormer(over(2)).optimize(model, policy)
    text = str(caught.value)
    assert "lm_head.weight shares its weight with a layer that the policy splits, but is itself left whole" in text
    assert 'lm_head("lm_head") in the policy' in text


def test_a_model_with_a_tied_head_left_out_is_as_it_was():
    refused(PolicyError, *tied_without_head())


def test_an_embedding_left_out_while_its_tied_head_is_split():
    model = tiny_model("LT", num_hidden_layers=1)
    with pytest.raises(
        PolicyError, match="embed_tokens.weight shares its weight with a layer that the policy splits"
    ) as caught:
        ShardFormer(over(2)).optimize(model, llama_policy(LlamaModel=norm("norm")))
    assert 'vocab_embedding("embed_tokens")' in str(caught.value), "the way out for an embedding is another word"


def test_tied_layers_that_are_split_differently():
    model = tiny_model("LT", num_hidden_layers=1)
    with pytest.raises(PolicyError, match="one weight is shared by two layers that the policy splits differently"):
        ShardFormer(over(2)).optimize(model, llama_policy(LlamaForCausalLM=row("lm_head")))


def test_a_family_without_policy():
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=16)
    with pytest.raises(PolicyError) as caught:
        find_policy(BertModel(config))
    text = str(caught.value)
    assert "there is no policy for BertModel (config.model_type = 'bert')" in text
    assert all(family in text for family in known_families())
    assert "custom_policy" in text and "TorchDDPPlugin" in text


def test_a_family_with_a_name_like_a_known_one():
    class Config(PretrainedConfig):
        model_type = "llama2"

    class Net(nn.Module):
        config = Config()

    with pytest.raises(PolicyError, match=r"nearest +LlamaPolicy \(llama\)"):
        find_policy(Net())
    with pytest.raises(PolicyError, match=r"there is no policy for Linear \(config.model_type = None\)"):
        find_policy(nn.Linear(2, 2))


def test_a_policy_for_another_family():
    text = refused(PolicyError, tiny_model("G2"), LlamaPolicy())
    assert "LlamaPolicy is for llama, mistral, qwen2, qwen3, and the model's type is 'gpt2'" in text


def test_a_policy_without_rules_says_what_is_missing():
    with pytest.raises(NotImplementedError, match="Policy must say in module_policy"):
        ShardFormer(over(2)).optimize(llama(), Policy())


@pytest.mark.parametrize("family", ["LL", "mistral", "qwen2", "qwen3"])
def test_numbers_that_are_too_small_come_together_with_the_sizes_that_work(family):
    model = tiny_model(family, num_hidden_layers=2, intermediate_size=3)
    text = refused(ConfigError, model, None, over(5))
    assert text.startswith(f"tp_size=5 does not fit {type(model).__name__} (3 problems).")
    assert "num_attention_heads" in text and "4 for 5 ranks" in text
    assert text.count("3 for 5 ranks") == 2
    assert "(model.layers.*.self_attn.q_proj, model.layers.*.self_attn.o_proj)" in text
    assert "(model.layers.*.mlp.gate_proj, model.layers.*.mlp.up_proj)" in text
    assert "(model.layers.*.mlp.down_proj)" in text
    assert "num_key_value_heads" not in text, "too few of them are held by several ranks"
    assert text.splitlines()[-1].split() == ["try", "tp_size=3", "or", "less"]


def test_gpt2_and_opt_say_their_head_counts():
    text = refused(ConfigError, tiny_model("G2"), None, over(5))
    assert "num_attention_heads" in text and "4 for 5 ranks" in text and "transformer.h.*.attn.c_proj" in text
    text = refused(ConfigError, tiny_model("OP"), None, over(5))
    assert "num_attention_heads" in text and "model.decoder.layers.*.self_attn.out_proj" in text


def test_more_ranks_than_heads():
    text = refused(ConfigError, llama(num_attention_heads=6, num_key_value_heads=6, hidden_size=48), None, over(7))
    assert "6 for 7 ranks" in text and "tp_size=6 or less" in text


@pytest.mark.parametrize("name", ["LL", "LT", "G2", "OP"])
def test_more_ranks_than_words(name):
    special = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1}
    heads = {"num_key_value_heads": 4} if name in ("LL", "LT") else {}
    text = refused(ConfigError, tiny_model(name, vocab_size=3, **special, **heads), None, over(4))
    assert "has 3 entries to share out over 4 ranks of tp" in text
    assert "tp_size=3 or less" in text


def test_more_ranks_than_words_in_a_base_model_too():
    model = tiny_model("LL", num_hidden_layers=1, vocab_size=1, num_key_value_heads=4).model
    text = refused(ConfigError, model, None, over(4))
    assert "the vocabulary has 1 entries" in text


def test_a_number_that_is_no_number():
    policy = llama_policy(LlamaMLP=col("gate_proj", "up_proj") + row("down_proj") + shrink("act_fn"))
    with pytest.raises(PolicyError, match="LlamaMLP keeps no whole number 'act_fn'"):
        ShardFormer(over(2)).optimize(llama(), policy)


@on_ranks(2)
def test_errors_are_raised_by_boost_on_every_rank_and_the_group_still_works():
    model = llama(num_attention_heads=1, num_key_value_heads=1)
    before = fingerprint(model)
    with pytest.raises(ConfigError, match="num_attention_heads  1 for 2 ranks"):
        Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32")).boost(model)
    assert_untouched(model, before)
    plugin = HybridParallelPlugin(tp_size=2, precision="fp32", custom_policy=llama_policy(LlamaMPL=col("x")))
    with pytest.raises(PolicyError, match="did you mean"):
        Booster(plugin=plugin).boost(llama())
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    assert total.item() == 2
