"""A policy written as the documents of the project describe it: classes as keys, explicit descriptions, a preprocess."""

import copy
import json

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cluster.mesh import Axis
from colonnade.model.layout import layout_of
from colonnade.shardformer import (
    LocalShare,
    ModelSharder,
    ModulePolicyDescription,
    Policy,
    ShardConfig,
    ShardFormer,
    SubModuleReplacementDescription,
    method,
)
from colonnade.shardformer.layer import FusedRMSNorm, Linear1D_Col, Linear1D_Row
from colonnade.testing.logical import gather_parameters
from colonnade.testing.parity import assert_same_as_single
from colonnade.testing.ranks import on_ranks
from colonnade.testing.tiny import ids, tiny_model


class SeedLlamaPolicy(Policy):
    def config_sanity_check(self):
        pass

    def preprocess(self):
        tp_size = self.shard_config.tensor_parallel_size
        if tp_size > 1:
            assert self.model.config.num_attention_heads % tp_size == 0
            self.model.config.num_attention_heads //= tp_size
            self.model.config.num_key_value_heads //= tp_size
        return self.model

    def module_policy(self):
        return {
            LlamaAttention: ModulePolicyDescription(
                attribute_replacement={"sharded_by": "the seed's policy"},
                sub_module_replacement=[
                    SubModuleReplacementDescription(suffix="q_proj", target_module=Linear1D_Col),
                    SubModuleReplacementDescription(suffix="k_proj", target_module=Linear1D_Col),
                    SubModuleReplacementDescription(suffix="v_proj", target_module=Linear1D_Col),
                    SubModuleReplacementDescription(suffix="o_proj", target_module=Linear1D_Row),
                ],
            ),
            LlamaMLP: ModulePolicyDescription(
                sub_module_replacement=[
                    SubModuleReplacementDescription(suffix="gate_proj", target_module=Linear1D_Col),
                    SubModuleReplacementDescription(suffix="up_proj", target_module=Linear1D_Col),
                    SubModuleReplacementDescription(suffix="down_proj", target_module=Linear1D_Row),
                ],
            ),
            LlamaDecoderLayer: ModulePolicyDescription(
                sub_module_replacement=[
                    SubModuleReplacementDescription(suffix="input_layernorm", target_module=FusedRMSNorm),
                    SubModuleReplacementDescription(suffix="post_attention_layernorm", target_module=FusedRMSNorm),
                ],
            ),
        }

    def postprocess(self):
        return self.model


def small_llama():
    return tiny_model("LL", num_hidden_layers=2, vocab_size=67)


def batches():
    return [{"input_ids": ids(4, 16, seed, 67), "labels": ids(4, 16, seed, 67)} for seed in (7, 8)]


def seed_plugin():
    return HybridParallelPlugin(tp_size=2, precision="fp32", custom_policy=SeedLlamaPolicy())


@on_ranks(2)
def test_it_gives_the_numbers_of_one_process():
    assert_same_as_single(small_llama, batches(), seed_plugin, steps=3)


@on_ranks(2)
def test_what_is_saved_carries_the_undivided_config(tmp_path):
    booster = Booster(plugin=seed_plugin())
    model, *_ = booster.boost(small_llama())
    attention = model.unwrap().model.layers[1].self_attn
    assert isinstance(attention.q_proj, Linear1D_Col)
    assert isinstance(attention.o_proj, Linear1D_Row)
    assert isinstance(model.unwrap().model.layers[0].input_layernorm, FusedRMSNorm)
    assert attention.sharded_by == "the seed's policy"
    assert model.unwrap().config.num_attention_heads == 2
    booster.save_model(model, tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (written["num_attention_heads"], written["num_key_value_heads"]) == (4, 2)
    assert LlamaConfig.from_pretrained(tmp_path / "saved").head_dim == 8
    again = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    x = ids(2, 8, vocab=67)
    torch.testing.assert_close(again(x).logits, small_llama()(x).logits)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.width = nn.Linear(6, 8), nn.Linear(8, 6), 8

    def forward(self, x):
        h = self.up(x)
        assert h.shape[-1] == self.width
        return self.down(torch.relu(h))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.scale = Inner(), 2.0
        self.gain = nn.Parameter(torch.ones(6))
        self.extra = None

    def forward(self, x):
        return self.helper(self.mlp(x)) * self.gain

    def helper(self, x):
        return x * self.scale


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Outer(), Outer()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def toy():
    torch.manual_seed(4)
    return Toy().double()


def halve_gain(module):
    with torch.no_grad():
        module.gain.mul_(0.5)


def negative_helper(self, x):
    return -x * self.scale


class EveryReplacement(Policy):
    """All four kinds of replacement, and a suffix that is a path."""

    def module_policy(self):
        return {
            Outer: ModulePolicyDescription(
                attribute_replacement={"scale": 3.0, "mlp.width": LocalShare()},
                param_replacement=[halve_gain],
                sub_module_replacement=[
                    SubModuleReplacementDescription("mlp.up", Linear1D_Col, kwargs={"units": 4}),
                    SubModuleReplacementDescription("mlp.down", Linear1D_Row, kwargs={"units": 4}),
                    SubModuleReplacementDescription("extra", Linear1D_Col, ignore_if_not_exist=True),
                    SubModuleReplacementDescription("nothing.of.the.kind", Linear1D_Col, ignore_if_not_exist=True),
                ],
                method_replacement={"helper": negative_helper},
            )
        }


@on_ranks(2)
def test_all_four_replacements_are_made():
    plain = toy()
    for block in plain.blocks:
        block.scale = -3.0
        halve_gain(block)
    model, shared = ShardFormer(ShardConfig()).optimize(toy(), EveryReplacement())
    assert shared == []
    for block in model.blocks:
        assert (block.scale, block.mlp.width) == (3.0, 4)
        assert block.helper.__self__ is block
        assert isinstance(block.mlp.up, Linear1D_Col) and block.mlp.up.weight.shape == (4, 6)
        assert isinstance(block.mlp.down, Linear1D_Row) and block.mlp.down.weight.shape == (6, 4)
        assert block.mlp.up.region is block.mlp.down.region
    assert model.blocks[0].mlp.up.region is not model.blocks[1].mlp.up.region
    x = torch.randn(3, 6, dtype=torch.float64)
    wanted, found = plain(x), model(x)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    wanted.square().sum().backward()
    found.square().sum().backward()
    gradients = gather_parameters(model, lambda p: p.grad, {}, Axis.of(None))
    for name, parameter in plain.named_parameters():
        assert gradients[name].missing == 0 and gradients[name].spread == 0.0
        torch.testing.assert_close(gradients[name].value, parameter.grad, rtol=1e-12, atol=1e-12)


class ByName(EveryReplacement):
    """The same rules under the name of the class, which needs no import of the model's file."""

    def module_policy(self):
        return {"Outer": super().module_policy()[Outer]}


@on_ranks(2)
def test_class_names_are_as_good_as_classes():
    by_class, _ = ShardFormer(ShardConfig()).optimize(toy(), EveryReplacement())
    by_name, _ = ShardFormer(ShardConfig()).optimize(toy(), ByName())
    x = torch.randn(3, 6, dtype=torch.float64)
    assert by_name(x).equal(by_class(x))


class Wrapping(Policy):
    """Other hooks: preprocess and postprocess may return another model."""

    def preprocess(self):
        return nn.Sequential(self.model)

    def module_policy(self):
        return {}

    def postprocess(self):
        return nn.Sequential(self.model, nn.Identity())


def test_preprocess_and_postprocess_may_return_another_model():
    model = toy()
    made, _ = ShardFormer(ShardConfig(enable_tensor_parallelism=False)).optimize(model, Wrapping())
    assert made[0][0] is model
    sharder = ModelSharder(toy(), Wrapping(), ShardConfig(enable_tensor_parallelism=False))
    sharder.shard()
    assert isinstance(sharder.model, nn.Sequential)


@on_ranks(2)
def test_optimize_alone_returns_the_model_and_the_groups_of_shared_parameters():
    for name, groups in (("LL", []), ("LT", [{"model.embed_tokens.weight", "lm_head.weight"}])):
        model = tiny_model(name, num_hidden_layers=1, vocab_size=67)
        plain = copy.deepcopy(model)
        made, shared = ShardFormer(ShardConfig()).optimize(model)
        assert made is model
        assert [set(group) for group in shared] == groups
        assert all(len({id(p) for p in group.values()}) == 1 for group in shared)
        x = ids(2, 8, vocab=67)
        wanted, found = plain(x, labels=x), made(x, labels=x)
        torch.testing.assert_close(found.loss, wanted.loss)
        torch.testing.assert_close(found.logits, wanted.logits)
        assert found.logits.shape == (2, 8, 67)


@on_ranks(2)
def test_an_optimizer_made_before_boosting_trains_the_very_parameters():
    for name in ("LT", "G2"):
        model = tiny_model(name)
        before = dict(model.named_parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        groups = optimizer.param_groups
        boosted, parallel, *_ = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32")).boost(
            model, optimizer
        )
        after = dict(boosted.unwrap().named_parameters())
        assert after.keys() == before.keys()
        assert all(after[key] is before[key] for key in before)
        assert parallel.param_groups is groups
        assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in after.values()}
        weights = {key: p.detach().clone() for key, p in after.items()}
        x = ids(2, 8)
        Booster(plugin=HybridParallelPlugin(tp_size=2)).backward(boosted(x, labels=x).loss, parallel)
        parallel.step()
        assert all(not p.equal(weights[key]) for key, p in after.items())


def test_every_layout_carries_the_models_own_names():
    axis = Axis("tp", 2, 1, (0, 1), None)
    model = tiny_model("LT", num_hidden_layers=1)
    ShardFormer(ShardConfig(tensor_parallel_process_group=axis)).optimize(model)
    assert layout_of(model.lm_head.weight).names == ("model.embed_tokens.weight", "lm_head.weight")
    assert layout_of(model.model.layers[0].mlp.up_proj.weight).names == ("model.layers.0.mlp.up_proj.weight",)


def test_the_word_method_wants_a_reason():
    with pytest.raises(TypeError, match="because"):
        method("forward", negative_helper)
    for nothing in ("", "   "):
        with pytest.raises(ValueError, match="needs a reason: name the door that is missing"):
            method("forward", negative_helper, because=nothing)
    rule = method("helper", negative_helper, because="the helper has no registry")
    assert rule.method_replacement == {"helper": negative_helper}
