"""A twin is small, keeps what a layout can get wrong, and trains; over many families and over real configurations."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from colonnade.model.twin import MAX_LAYERS, VOCAB, WINDOW, build, model_class, shrink, twin_model

FAMILIES = """
llama mistral qwen2 qwen3 gpt2 opt gemma gemma2 gemma3_text phi phi3 starcoder2 granite olmo olmo2 olmo3 smollm3 gpt_neox
gptj gpt_neo gpt_bigcode codegen bloom falcon mpt xglm biogpt bert roberta electra modernbert-decoder mixtral qwen2_moe
qwen3_moe olmoe granitemoe gpt_oss deepseek_v3 glm4_moe ernie4_5_moe phimoe llama4_text cohere cohere2 glm glm4 stablelm
persimmon helium arcee apertus exaone4 ernie4_5 seed_oss cwm vaultgemma diffllama nanochat bitnet minicpm3 jetmoe doge
qwen3_next jamba falcon_h1 nemotron_h t5 bart pegasus gemma3
""".split()  # noqa: SIM905  # one name a line would fill a screen

# what no configuration of the family lacks that comes with weights
NEEDED = {"t5": {"decoder_start_token_id": 0}}
LLAMA3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def small(model_type, multiple=2, **fields):
    return shrink(AutoConfig.for_model(model_type, **fields), multiple)


def train_once(config):
    model = twin_model(config)
    ids = torch.randint(3, VOCAB - 5, (2, 2 * WINDOW), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return model, loss


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_twin_of_a_family_is_small_and_trains(model_type):
    config = small(model_type, **NEEDED.get(model_type, {}))
    model, loss = train_once(config)
    assert loss.isfinite()
    assert sum(p.numel() for p in model.parameters()) < 6_000_000
    text = config.get_text_config()
    assert text.vocab_size == VOCAB
    layers = getattr(text, "num_hidden_layers", None) or text.num_layers
    assert layers <= MAX_LAYERS
    dropouts = {n: v for n, v in vars(text).items() if "drop" in n and isinstance(v, float)}
    assert not any(dropouts.values()), dropouts


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_given_configuration_is_left_alone_and_its_kind_of_model_kept(model_type):
    config = AutoConfig.for_model(model_type)
    before = copy.deepcopy(config.to_dict())
    twin = shrink(config)
    assert config.to_dict() == before
    assert type(twin) is type(config) and model_class(twin) is model_class(config)
    assert twin.tie_word_embeddings == config.tie_word_embeddings


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "gemma2", "qwen3_moe", "deepseek_v3", "falcon", "phi3"])
def test_a_twin_of_a_twin_is_the_twin(model_type):
    twin = small(model_type)
    assert shrink(twin).to_dict() == twin.to_dict()


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text", "mixtral", "phi3", "gpt_neo"])
def test_a_twin_can_be_written_and_read(model_type, tmp_path):
    twin = small(model_type)
    twin.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    shapes = []
    for config in (twin, again):
        with torch.device("meta"):
            shapes.append({name: tuple(p.shape) for name, p in build(config).named_parameters()})
    assert shapes[0] == shapes[1]


def test_only_sizes_ids_and_dropouts_change():
    config = AutoConfig.for_model(
        "llama", **LLAMA3_8B, attention_bias=True, mlp_bias=True, hidden_act="gelu", attention_dropout=0.1
    )
    twin, whole = shrink(config).to_dict(), config.to_dict()
    changed = {name for name in whole if whole[name] != twin[name]}
    assert changed == {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "bos_token_id", "eos_token_id", "attention_dropout",
    }  # fmt: skip
    assert twin["rope_parameters"] == LLAMA3_8B["rope_parameters"]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "multiple"),
    [(32, 8, 2), (32, 32, 2), (64, 8, 4), (32, 8, 8), (40, 10, 2), (14, 2, 2), (28, 4, 4), (24, 8, 2), (12, 4, 4)],
)
def test_heads_per_key_value_head_and_what_divides_them_stay(heads, kv_heads, multiple):
    twin = small("llama", multiple, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=64 * heads)
    assert twin.num_attention_heads / twin.num_key_value_heads == heads / kv_heads
    assert (twin.num_key_value_heads % multiple == 0) == (kv_heads % multiple == 0)
    assert twin.head_dim * twin.num_attention_heads == twin.hidden_size
    train_once(twin)


def test_counts_that_do_not_divide_still_do_not():
    twin = small("llama", 2, num_attention_heads=9, num_key_value_heads=3, hidden_size=576)  # SmolLM2 135M
    assert (twin.num_attention_heads, twin.num_key_value_heads) == (9, 3)


def test_one_key_value_head_stays_one_and_many_groups_are_reduced():
    twin = small("llama", num_attention_heads=48, num_key_value_heads=1, hidden_size=48 * 128)
    assert twin.num_key_value_heads == 1
    assert 4 <= twin.num_attention_heads <= 8 and twin.num_attention_heads % 2 == 0


def test_a_head_width_that_is_not_hidden_size_by_heads_stays_so():
    qwen3 = small("qwen3", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    assert qwen3.head_dim * qwen3.num_attention_heads == 2 * qwen3.hidden_size
    gemma = small("gemma", hidden_size=2048, num_attention_heads=8, num_key_value_heads=1, head_dim=256)
    assert gemma.head_dim * gemma.num_attention_heads == gemma.hidden_size


def test_one_layer_of_each_kind_is_there_and_windows_are_narrow():
    twin = small("gemma3_text", num_hidden_layers=26)
    assert twin.layer_types == ["sliding_attention", "full_attention"]
    assert twin.num_hidden_layers == 2 and twin.sliding_window == WINDOW
    dense_first = small("deepseek_v3")
    assert dense_first.num_hidden_layers == 2
    kinds = [type(layer.mlp).__name__ for layer in twin_model(dense_first).model.layers]
    assert len(set(kinds)) == 2
    rope = small("smollm3")
    assert set(rope.no_rope_layers) == {0, 1}
    neo = small("gpt_neo")
    assert neo.attention_layers == ["global", "local"] and neo.window_size == WINDOW


def test_experts_are_few_and_at_least_as_many_as_are_chosen():
    twin = small("qwen3_moe", num_experts=128, num_experts_per_tok=8)
    assert twin.num_experts == 4 and twin.num_experts_per_tok == 2
    groups = small("deepseek_v3")
    assert (groups.n_routed_experts, groups.n_group, groups.topk_group) == (4, 2, 1)
    assert small("mixtral", num_local_experts=8, num_experts_per_tok=1).num_experts_per_tok == 1


def test_rotary_tables_fit_the_narrow_heads():
    factors = [1.0 + i for i in range(48)]
    twin = small(
        "phi3",
        hidden_size=3072,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors, "long_factor": factors,
            "original_max_position_embeddings": 4096,
        },
    )  # fmt: skip
    assert len(twin.rope_parameters["long_factor"]) == twin.hidden_size // twin.num_attention_heads // 2
    train_once(twin)


def test_an_embedding_narrower_than_the_hidden_size_stays_narrower():
    twin = small("opt", hidden_size=1024, word_embed_proj_dim=512, num_attention_heads=16, ffn_dim=4096)  # OPT 350M
    assert twin.word_embed_proj_dim < twin.hidden_size
    assert train_once(twin)[0].model.decoder.project_in is not None


@pytest.mark.parametrize(
    "variant",
    [
        {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 64, "hidden_size": 4096},
        {"multi_query": True, "num_attention_heads": 71, "hidden_size": 4544},
        {"multi_query": False, "alibi": True, "num_attention_heads": 32, "hidden_size": 4096},
    ],
    ids=["grouped", "one key", "alibi"],
)
def test_falcon_in_its_three_forms(variant):
    twin = small("falcon", **variant)
    assert twin.alibi == variant.get("alibi", False)
    assert twin.num_attention_heads % 2 == variant["num_attention_heads"] % 2
    train_once(twin)


def test_token_ids_lie_in_the_vocabulary_and_stay_different():
    twin = small("llama", **LLAMA3_8B, pad_token_id=128004)
    ids = [twin.bos_token_id, *twin.eos_token_id, twin.pad_token_id]
    assert len(set(ids)) == 5 and max(ids) < VOCAB


def test_a_configuration_inside_a_configuration_is_scaled_too():
    twin = small("gemma3")
    assert twin.text_config.vocab_size == VOCAB and twin.text_config.hidden_size < 256
    assert twin.vision_config.hidden_size < 256


def test_every_entry_of_a_twin_matters_and_is_the_same_again():
    config = small("gpt2")
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second = twin_model(config), twin_model(config)
    assert torch.equal(torch.random.get_rng_state(), before)
    for (name, a), b in zip(first.named_parameters(), second.parameters()):
        assert torch.equal(a, b)
        assert a.std() > 0.05, name


def test_encoders_and_pairs_get_their_own_models():
    assert model_class(AutoConfig.for_model("bert")).__name__ == "BertForMaskedLM"
    assert model_class(AutoConfig.for_model("bert", is_decoder=True)).__name__ == "BertLMHeadModel"
    assert model_class(AutoConfig.for_model("t5")).__name__ == "T5ForConditionalGeneration"
    assert model_class(AutoConfig.for_model("vit")).__name__ == "ViTForImageClassification"
    assert model_class(AutoConfig.for_model("sam")).__name__ == "SamModel"
    named = AutoConfig.for_model("gpt2", architectures=["GPT2DoubleHeadsModel"])
    assert model_class(named).__name__ == "GPT2DoubleHeadsModel"
    with pytest.raises(ValueError, match="no model for PreTrainedConfig"):
        model_class(PretrainedConfig())
