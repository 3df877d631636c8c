"""The vocabulary of models that tie more than a table and a head: split alone, the rest of the model whole."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.cluster.mesh import Axis
from colonnade.comm.ledger import ledger
from colonnade.errors import PolicyError
from colonnade.model.layout import has_layout, layout_of
from colonnade.shardformer import ModelSharder, Policy, ShardConfig, ShardFormer, col, lm_head, row, vocab_embedding
from colonnade.shardformer.inference.check import Twin
from colonnade.shardformer.inference.policy import InferredPolicy
from colonnade.shardformer.layer import Linear1D_Col, VocabParallelEmbedding1D, VocabParallelLMHead1D
from colonnade.shardformer.layer.loss import CausalLMLoss
from colonnade.shardformer.policies.llama import LlamaPolicy
from colonnade.testing.logical import gather_parameters
from colonnade.testing.parity import assert_same_as_single
from colonnade.testing.ranks import on_ranks, run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

VOCABULARY = 67
TWO = Axis("tp", 2, 0, (0, 1), None)  # enough to look at a split model; nothing is communicated
_BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
_BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None, "scale_embedding": True,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0,
    "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
_PROPHETNET = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "encoder_ffn_dim": 48, "num_encoder_layers": 1,
    "num_encoder_attention_heads": 4, "decoder_ffn_dim": 48, "num_decoder_layers": 1, "num_decoder_attention_heads": 4,
    "max_position_embeddings": 64, "attention_dropout": 0.0, "dropout": 0.0, "activation_dropout": 0.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
# class: (model type, configuration, choice of the vocabulary, modules that share the one weight, of the head's bias)
MODELS = {
    "BertLMHeadModel": ("bert", _BERT | {"is_decoder": True}, "split", 2, 2),
    "BertForMaskedLM": ("bert", _BERT, "split", 2, 2),
    "RobertaForCausalLM": ("roberta", _BERT | {"is_decoder": True}, "split", 2, 2),
    "AlbertForMaskedLM": ("albert", _BERT | {"embedding_size": 16}, "split", 2, 2),
    "ElectraForCausalLM": ("electra", _BERT | {"embedding_size": 16, "is_decoder": True}, "split", 2, 1),
    "T5ForConditionalGeneration": ("t5", _T5, "split", 4, 0),
    "BartForConditionalGeneration": ("bart", _BART, "split", 4, 0),
    "BartForCausalLM": ("bart", _BART | {"is_decoder": True, "is_encoder_decoder": False}, "split", 2, 0),
    "PegasusForConditionalGeneration": ("pegasus", _BART, "split", 4, 0),
    "ProphetNetForConditionalGeneration": ("prophetnet", _PROPHETNET, "split", 4, 0),
    "ProphetNetForCausalLM": (
        "prophetnet", _PROPHETNET | {"is_decoder": True, "is_encoder_decoder": False}, "split", 3, 0,
    ),
    "DoryForCausalLM": (
        "dory",
        {
            "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0,
        },
        "gathered", 1, 0,
    ),
}  # fmt: skip


def build(name):
    """The same model of a class at every call; every parameter and buffer of it matters."""
    family, options, *_ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(AutoConfig.for_model(family, **options))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.randn(model.final_logits_bias.shape, generator=generator))
    model.config.use_cache = False
    return model


def batch(seed=7):
    x = ids(2, 12, seed=seed, vocab=VOCABULARY).clamp(min=3)
    x[0, :2], labels = torch.tensor([3, VOCABULARY - 1]), x.clone()
    labels[0, :5] = -100
    return {"input_ids": x, "labels": labels}


def plugin(name, tp_size):
    policy = InferredPolicy([], 0, MODELS[name][2])
    return HybridParallelPlugin(tp_size=tp_size, precision="fp32", max_norm=1.0, custom_policy=policy)


def train(name, tp_size):
    assert_same_as_single(
        lambda: build(name), [batch(7), batch(8)], lambda: plugin(name, tp_size), steps=3, max_norm=1.0
    )


TRAINED = [name for name in MODELS if name != "DoryForCausalLM"]  # which fp32 rounds too coarsely to be compared


@pytest.mark.parametrize("tp_size", [2, 3])
@pytest.mark.parametrize("name", TRAINED)
def test_a_model_whose_vocabulary_alone_is_split_trains_as_in_one_process(name, tp_size):
    run_on_ranks(tp_size, train, name, tp_size)


def test_a_head_that_scales_whole_logits_has_to_gather_them():
    twin = Twin(build("DoryForCausalLM"), 2)
    found = {choice: twin.difference(InferredPolicy([], 0, choice)) for choice in ("split", "gathered", "whole")}
    assert "size of tensor a" in found["split"]
    assert not found["gathered"] and not found["whole"]


@pytest.mark.parametrize("name", MODELS)
def test_every_name_of_a_tied_weight_is_split_and_stays_one_parameter(name):
    *_, choice, of_weight, of_bias = MODELS[name]
    model = build(name)
    names = [key for key, _ in model.named_parameters(remove_duplicate=False)]
    ModelSharder(model, InferredPolicy([], 0, choice), ShardConfig(TWO)).shard()
    assert [key for key, _ in model.named_parameters(remove_duplicate=False)] == names
    head = model.get_output_embeddings()
    assert isinstance(head, VocabParallelLMHead1D) and isinstance(model.get_input_embeddings(), nn.Embedding)
    for parameter, count in ((head.weight, of_weight), (head.bias, of_bias)):
        if parameter is not None and count:
            held = [key for key, p in model.named_parameters(remove_duplicate=False) if p is parameter]
            assert len(held) == count
            assert layout_of(parameter).names == tuple(held)
            assert parameter.shape[0] == 34
    split = {key for key, p in model.named_parameters() if has_layout(p)}
    assert all(model.get_parameter(key).shape[0] in (33, 34) for key in split)


def save_and_load(name, folder):
    model = build(name)
    booster = Booster(plugin=plugin(name, 2))
    boosted, *_ = booster.boost(model)
    booster.save_model(boosted, folder / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    booster.load_model(boosted, folder / "model")
    found = gather_parameters(model, lambda p: p, {}, Axis.of(None))
    return {key: tensor.value for key, tensor in found.items()}


@pytest.mark.parametrize("name", TRAINED)
def test_a_checkpoint_has_each_tied_weight_as_transformers_writes_it(name, tmp_path):
    native = build(name)
    native.save_pretrained(tmp_path / "own")
    for found in run_on_ranks(2, save_and_load, name, tmp_path):
        for key, parameter in native.named_parameters():
            assert found[key].equal(parameter), key
    own, ours = ({p.name for p in (tmp_path / folder).iterdir()} for folder in ("own", "model"))
    assert own == ours
    wanted, written = (load_file(tmp_path / folder / "model.safetensors") for folder in ("own", "model"))
    assert wanted.keys() == written.keys()
    assert all(written[key].equal(value) for key, value in wanted.items())
    loaded = getattr(transformers, name).from_pretrained(tmp_path / "model")
    assert all(p.equal(native.get_parameter(key)) for key, p in loaded.named_parameters())


@pytest.mark.parametrize(
    "model",
    [
        lambda: transformers.BertForSequenceClassification(AutoConfig.for_model("bert", **_BERT, num_labels=5)),
        lambda: transformers.BartForSequenceClassification(AutoConfig.for_model("bart", **_BART, num_labels=5)),
        lambda: transformers.BertForTokenClassification(AutoConfig.for_model("bert", **_BERT, num_labels=5)),
        lambda: transformers.T5ForSequenceClassification(AutoConfig.for_model("t5", **_T5, num_labels=5)),
    ],
)
def test_a_head_of_classes_stays_whole(model):
    model = model()
    sharder = ModelSharder(model, InferredPolicy([], 0, "split"), ShardConfig(TWO))
    sharder.shard()
    assert sharder.replaced and all(kind == "VocabParallelEmbedding1D" for _, kind in sharder.replaced)


class ClassesCalledHead(LlamaForCausalLM):
    """A classifier whose layer goes by the name of a language model's."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, 3)


def test_a_head_of_classes_stays_whole_even_where_it_is_called_lm_head():
    model = ClassesCalledHead(tiny_model("LL").config)
    sharder = ModelSharder(model, InferredPolicy([], 0, "split"), ShardConfig(TWO))
    sharder.shard()
    assert [kind for _, kind in sharder.replaced] == ["VocabParallelEmbedding1D"]


def test_a_whole_vocabulary_is_left_alone():
    sharder = ModelSharder(build("BertForMaskedLM"), InferredPolicy([], 0, "whole"), ShardConfig(TWO))
    sharder.shard()
    assert not sharder.replaced


class GatheredLlama(LlamaPolicy):
    def module_policy(self):
        return super().module_policy() | {"LlamaForCausalLM": lm_head("lm_head", gather=True)}


def train_gathered():
    make = lambda: HybridParallelPlugin(tp_size=2, precision="fp32", custom_policy=GatheredLlama())  # noqa: E731
    assert_same_as_single(lambda: tiny_model("LT", vocab_size=VOCABULARY), [batch()], make, steps=2)
    model, *_ = Booster(plugin=make()).boost(tiny_model("LT", vocab_size=VOCABULARY))
    with ledger() as book:
        output = model(**batch())
    assert output.logits.shape == (2, 12, VOCABULARY)
    return book.elements["all_gather", "tp"]


def test_a_head_may_gather_its_logits():
    for gathered in run_on_ranks(2, train_gathered):
        assert gathered == 2 * 12 * 68  # padded to equal shares on the wire


class TwoHeads(LlamaForCausalLM):
    """Has a second head over the vocabulary, whose logits it uses by itself."""

    def __init__(self, config):
        super().__init__(config)
        self.second = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class TwoHeadsPolicy(Policy):
    def module_policy(self):
        return {
            "TwoHeads": lm_head("lm_head") + lm_head("second"),
            "LlamaModel": vocab_embedding("embed_tokens"),
        }


def test_only_the_head_that_feeds_the_loss_keeps_its_logits_split():
    model = TwoHeads(tiny_model("LL").config)
    ModelSharder(model, TwoHeadsPolicy(), ShardConfig(TWO)).shard()
    assert not model.lm_head.gather_output and model.second.gather_output
    assert isinstance(model.loss_function, CausalLMLoss) and model.loss_function.tp is TWO


class Stack(nn.Module):
    def __init__(self, table, inner):
        super().__init__()
        self.table, self.up, self.down = table, inner, nn.Linear(12, 8)

    def forward(self, ids):
        return self.down(torch.relu(self.up(self.table(ids))))


class TwoStacks(nn.Module):
    """Two stacks that use the same table and the same layer: the modules, not just their weights."""

    def __init__(self):
        super().__init__()
        table, inner = nn.Embedding(13, 8), nn.Linear(8, 12)
        self.first, self.second = Stack(table, inner), Stack(table, inner)
        self.again = table

    def forward(self, ids):
        return self.first(ids) + 2 * self.second(ids) + self.again(ids)


class TwoStacksPolicy(Policy):
    def module_policy(self):
        return {"Stack": vocab_embedding("table") + col("up") + row("down")}


@on_ranks(2)
def test_a_module_that_is_used_in_several_places_is_replaced_in_each():
    torch.manual_seed(0)
    plain, model = TwoStacks().double(), TwoStacks().double()
    model.load_state_dict(plain.state_dict())
    ShardFormer(ShardConfig(Axis.of(None))).optimize(model, TwoStacksPolicy())
    assert model.first.table is model.second.table is model.again
    assert isinstance(model.again, VocabParallelEmbedding1D)
    assert model.first.up is model.second.up and isinstance(model.first.up, Linear1D_Col)
    x = torch.arange(13)
    wanted, found = plain(x), model(x)
    torch.testing.assert_close(found, wanted)
    for y in (wanted, found):
        y.square().sum().backward()
    for key, tensor in gather_parameters(model, lambda p: p.grad, {}, Axis.of(None)).items():
        torch.testing.assert_close(tensor.value, plain.get_parameter(key).grad)


def test_a_weight_of_another_module_is_still_refused():
    class Copied(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack, self.weight = TwoStacks(), None
            self.weight = nn.Module()
            self.weight.of_table = self.stack.again.weight

    with pytest.raises(PolicyError, match=r"weight\.of_table shares its weight with a layer that the policy splits"):
        ShardFormer(ShardConfig(TWO)).optimize(Copied(), TwoStacksPolicy())
