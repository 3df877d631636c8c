"""Policies of the known families: base models, other heads, fused norms, and what transformers' own plans say."""

import pytest
import torch
from transformers import AutoModel, LlamaConfig, LlamaForSequenceClassification

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cluster.mesh import Axis
from colonnade.shardformer import ModelSharder, ShardConfig, find_policy, known_families
from colonnade.shardformer.layer import FusedLayerNorm, FusedRMSNorm
from colonnade.testing.logical import gather_parameters
from colonnade.testing.parity import assert_same_as_single
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import NOISE, ids, tiny_config, tiny_model

MODELS = ["LL", "LT", "G2", "OP", "mistral", "qwen2", "qwen3"]
COLUMN = {"Linear1D_Col", "FusedLinear1D_Col", "Conv1D_Col", "FusedLinearConv1D_Col"}
ROW = {"Linear1D_Row", "Conv1D_Row"}
MEANS = {
    "colwise": COLUMN,
    "colwise_gather_output": COLUMN | {"VocabParallelLMHead1D"},
    "colwise_rep": COLUMN | {"VocabParallelLMHead1D"},
    "rowwise": ROW,
    "embedding_rowwise": {"VocabParallelEmbedding1D"},
    "replicated_with_grad_allreduce": {"HeadNorm"},
}


def noisy(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator))
    return model


def choices(model):
    """Name → layer class or role of everything the family's policy touches."""
    sharder = ModelSharder(model, find_policy(model), ShardConfig(enable_tensor_parallelism=False))
    sharder.shard()
    return dict(sharder.replaced)


def stars(name):
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


@pytest.mark.parametrize("name", MODELS)
def test_choices_agree_with_transformers_own_plan(name):
    model = tiny_model(name)
    base, plan = model.base_model_prefix, dict(model.config.base_model_tp_plan or {})
    plan = {f"{base}.{key}": style for key, style in plan.items()} | dict(type(model)._tp_plan or {})
    found = {stars(key): layer for key, layer in choices(model).items()}
    for key, style in plan.items():
        assert found.get(key) in MEANS[style], f"{key}: transformers says {style}, the policy {found.get(key)}"
    split = {key for key, layer in found.items() if layer in COLUMN | ROW}
    assert split, "the policy splits something"
    if model.config.base_model_tp_plan:
        assert split == {key for key, style in plan.items() if MEANS[style] & (COLUMN | ROW) and key != "lm_head"}


@pytest.mark.parametrize("name", MODELS)
def test_every_linear_layer_and_every_norm_is_spoken_of(name):
    model = tiny_model(name)
    matrices = {
        stars(path)
        for path, module in model.named_modules()
        if any(p.dim() == 2 for p in module.parameters(recurse=False)) and "position" not in path and "wpe" not in path
    }
    norms = {stars(path) for path, module in model.named_modules() if "Norm" in type(module).__name__}
    found = {stars(path) for path in choices(model)}
    assert matrices | norms == found


def test_there_is_a_policy_for_each_of_the_tiny_models():
    assert {tiny_config(name).model_type for name in MODELS} <= known_families().keys()
    for policy in known_families().values():
        assert policy.spine is not None


@pytest.mark.parametrize("name", MODELS)
def test_the_spine_finds_its_parts(name):
    model = tiny_model(name)
    spine = find_policy(model).spine
    assert len(spine.blocks_of(model)) == model.config.num_hidden_layers
    assert spine.embeds_of(model)
    assert spine.norm_of(model) is not None
    assert spine.head_of(model) is model.get_output_embeddings()
    assert spine.blocks_of(spine.base_of(model)) is spine.blocks_of(model)
    assert spine.head_of(spine.base_of(model)) is None


def hidden_states(name):
    """Output and gradients of a base model, which has no head and no loss."""
    config = tiny_config(name, vocab_size=67)
    torch.manual_seed(0)
    plain = noisy(AutoModel.from_config(config))
    torch.manual_seed(0)
    given = noisy(AutoModel.from_config(config))
    model, *_ = Booster(plugin=HybridParallelPlugin(tp_size=2, precision="fp32")).boost(given)
    x = ids(2, 12, vocab=67)
    wanted, found = plain(x).last_hidden_state, model(x).last_hidden_state
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    wanted.square().mean().backward()
    found.square().mean().backward()
    gradients = gather_parameters(given, lambda p: p.grad, {}, Axis.of(None))
    largest = max(float(p.grad.abs().max()) for p in plain.parameters())
    for key, parameter in plain.named_parameters():
        assert gradients[key].missing == 0 and gradients[key].spread == 0.0, key
        torch.testing.assert_close(gradients[key].value, parameter.grad, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("name", ["LL", "G2", "OP", "qwen3"])
def test_a_base_model_without_head(name):
    run_on_ranks(2, hidden_states, name)


def classifier(padding=0):
    options = tiny_config("LL", num_hidden_layers=2, vocab_size=67).to_dict()
    config = LlamaConfig(**options | {"num_labels": 3, "pad_token_id": padding, "problem_type": None})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return noisy(LlamaForSequenceClassification(config))


def classified():
    """Batches with one label for each row; rows end in padding of different lengths."""
    batches = []
    for seed in (7, 8):
        x = ids(4, 12, seed, 67).clamp(min=1)
        for line in range(4):
            x[line, 12 - line :] = 0
        batches.append({"input_ids": x, "attention_mask": (x != 0).long(), "labels": torch.tensor([0, 2, 1, 2])})
    return batches


@pytest.mark.parametrize("world, tp_size", [(2, 2), (2, 1), (4, 2)])
def test_a_classifier_on_the_same_base(world, tp_size):
    run_on_ranks(world, train_classifier, tp_size)


def train_classifier(tp_size):
    assert_same_as_single(
        classifier, classified(), lambda: HybridParallelPlugin(tp_size=tp_size, precision="fp32", max_norm=1.0),
        steps=3, max_norm=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_fused_norms_give_the_same_numbers(name):
    run_on_ranks(2, train_with_fused_norms, name)


def small(name):
    return tiny_model(name, vocab_size=67, num_hidden_layers=2)


def fused_plugin():
    return HybridParallelPlugin(tp_size=2, precision="fp32", enable_fused_normalization=True)


def train_with_fused_norms(name):
    batch = {"input_ids": ids(2, 12, vocab=67), "labels": ids(2, 12, vocab=67)}
    assert_same_as_single(lambda: small(name), [batch], fused_plugin, steps=2)
    model, *_ = Booster(plugin=fused_plugin()).boost(small(name))
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]
    assert norms
    assert all(isinstance(module, (FusedRMSNorm, FusedLayerNorm)) for module in norms)
