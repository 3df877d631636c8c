"""What a twin keeps of structures that few families have: stretches of layers, sizes of single layers, models in parts."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, Dinov2Model, PretrainedConfig, SamConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from colonnade.model.default_configs import MISSING_FIELDS, default_config
from colonnade.model.twin import VOCAB, WINDOW, build, shrink, twin_model
from colonnade.model.twin_sizes import TOKENS, head_counts, small_count
from colonnade.shardformer.inference import probe

# families whose sizes are in fields or in relations that no other family has
UNUSUAL = """
blt dory dots3_note dots3_note_text falcon_mamba gemma3n_text gemma4_text hrm_text inkling2_loop_text laguna mamba mamba2
mimo_v2_flash nemotron_h rwkv roc_bert xlstm zamba zamba2
""".split()  # noqa: SIM905  # one name a line would fill a screen
# their forward takes what another model makes
OTHER_INPUTS = {"gemma4_assistant"}


def causal_twin(model_type, multiple=2):
    config = shrink(default_config(model_type), multiple)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    return config


def train_once(config):
    model = twin_model(config)
    ids = torch.randint(3, VOCAB - 5, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return model, loss


@pytest.mark.parametrize("multiple", [2, 4])
@pytest.mark.parametrize("model_type", UNUSUAL)
def test_a_twin_of_an_unusual_family_is_small_and_trains(model_type, multiple):
    model, loss = train_once(causal_twin(model_type, multiple))
    assert loss.isfinite()
    assert sum(p.numel() for p in model.parameters()) < 2_000_000


@pytest.mark.parametrize("model_type", sorted({*MISSING_FIELDS} & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}))
def test_a_type_whose_own_defaults_are_not_enough_makes_a_model_that_trains(model_type):
    config = causal_twin(model_type)
    if model_type in OTHER_INPUTS:
        assert sum(p.numel() for p in build(config).parameters()) < 2_000_000
    else:
        assert train_once(config)[1].isfinite()


def test_fields_are_filled_in_only_where_they_are_missing():
    assert default_config("llama").to_dict() == AutoConfig.for_model("llama").to_dict()
    config = default_config("ministral")
    differs = {
        name for name, value in config.to_dict().items() if value != AutoConfig.for_model("ministral").to_dict()[name]
    }
    assert differs == {"head_dim"}
    default_config("qwen4_exp_text").rope_parameters["rope_theta"] = 1.0
    assert default_config("qwen4_exp_text").rope_parameters["rope_theta"] != 1.0


def test_sequences_are_as_long_as_those_that_twins_are_fed():
    assert TOKENS == probe.TOKENS > WINDOW


@pytest.mark.parametrize(
    ("count", "multiple", "small"),
    [(32, 2, 4), (32, 4, 4), (32, 8, 8), (12, 8, 12), (14, 4, 6), (71, 4, 5), (6, 4, 6), (5, 4, 5), (6, 8, 6), (2, 4, 2),
     (3, 4, 3), (1, 4, 1)],
)  # fmt: skip
def test_a_small_count_is_shared_out_as_the_given_one(count, multiple, small):
    assert small_count(count, multiple, about=4) == small


@pytest.mark.parametrize(
    ("heads", "kv_heads", "multiple", "small"),
    [(32, 1, 4, (1, 4)), (32, 2, 4, (2, 8)), (9, 3, 2, (3, 9)), (28, 4, 4, (4, 28)), (24, 6, 4, (6, 24)),
     (16, 8, 16, (8, 16)), (12, 3, 4, (3, 12))],
)  # fmt: skip
def test_key_value_heads_fewer_than_ranks_stay_fewer_and_uneven_ones_uneven(heads, kv_heads, multiple, small):
    assert head_counts(kv_heads, heads, multiple) == small


def test_stretches_of_layers_each_keep_one_of_each_kind():
    twin = shrink(default_config("dory"))
    assert (twin.n_input_layers, twin.n_recurrent_layers, twin.n_output_layers) == (2, 2, 2)
    assert twin.layer_types == ["sliding_attention", "full_attention"] * 3
    loop = shrink(default_config("inkling2_loop_text"))
    start, end = loop.loop_layer_index_start, loop.loop_layer_index_end
    assert 0 < start < end < loop.num_hidden_layers
    assert start % loop.n_layers_per_attn_res_block == end % loop.n_layers_per_attn_res_block == 0


def test_layers_that_use_the_keys_of_earlier_ones_still_do():
    twin = shrink(default_config("gemma3n_text"))
    own = twin.layer_types[: -twin.num_kv_shared_layers]
    shared = twin.layer_types[-twin.num_kv_shared_layers :]
    assert set(shared) <= set(own) and 0 < len(shared) < twin.num_hidden_layers


@pytest.mark.parametrize("model_type", ["zamba", "zamba2"])
def test_a_block_that_layers_share_is_used_twice(model_type):
    config = default_config(model_type)
    twin = shrink(config)
    assert twin.layers_block_type.count("hybrid") == 2
    model = twin_model(twin)
    hybrid = [
        layer for layer in model.model.layers if hasattr(layer, "shared_transf") or hasattr(layer, "shared_transformer")
    ]
    blocks = [getattr(layer, "shared_transf", None) or layer.shared_transformer for layer in hybrid]
    assert len(blocks) == 2
    assert next(blocks[0].parameters()) is next(blocks[1].parameters())


def test_two_shared_blocks_are_both_there_and_one_is_used_twice():
    config = default_config("zamba2")
    config.num_mem_blocks = 2
    assert shrink(config).layers_block_type.count("hybrid") == 3


def test_sizes_of_single_layers_are_scaled_with_the_others():
    gemma = shrink(default_config("gemma4_text"))
    (wide,) = gemma.to_dict()["per_layer_config"].values()
    assert wide == {"head_dim": 2 * gemma.to_dict()["head_dim"]}
    note = shrink(default_config("dots3_note_text"))
    assert note.per_layer_config["sliding_attention"].num_attention_heads == 2
    assert note.per_layer_config["indexed_attention"].num_attention_heads == 4


def test_parts_that_hand_over_hidden_states_fit_as_before():
    twin = shrink(default_config("blt"))
    assert twin.encoder_config.hidden_size * twin.cross_attn_k == twin.global_config.hidden_size
    assert twin.encoder_config.hidden_size_global == twin.global_config.hidden_size
    assert twin.global_config.encoder_cross_output_size is None  # so no projection comes between
    note = shrink(default_config("dots3_note"))
    assert note.vision_config.adapter_out_dim == note.audio_config.adapter_out_dim == note.text_config.hidden_size
    sam = shrink(SamConfig())
    assert (
        sam.vision_config.output_channels
        == sam.mask_decoder_config.hidden_size
        == sam.prompt_encoder_config.hidden_size
    )
    assert 2 * sam.vision_config.num_pos_feats == sam.vision_config.output_channels


def test_a_part_without_heads_is_scaled_as_the_model_around_it():
    config = default_config("dbrx")
    config.attn_config.kv_n_heads = config.num_key_value_heads = 8
    twin = shrink(config)
    assert (twin.n_heads, twin.attn_config.kv_n_heads) == (4, 2)
    assert twin.ffn_config.hidden_size == twin.d_model


def test_heads_of_state_space_blocks_share_out_the_width_they_had():
    twin = shrink(default_config("mamba2"), 4)
    assert twin.num_heads * twin.head_dim == twin.expand * twin.hidden_size
    assert twin.num_heads % 4 == 0 and twin.num_heads % twin.n_groups == 0 and twin.n_groups > 1
    assert twin.chunk_size == WINDOW


def test_a_backbone_returns_the_stages_it_did():
    twin = shrink(AutoConfig.for_model("dinov2", out_indices=[3, 12]))
    assert twin.stage_names == ["stem", "stage1", "stage2"] and twin.out_indices == [2]
    with torch.device("meta"):
        assert len(Dinov2Model(shrink(AutoConfig.for_model("dinov2"))).encoder.layer) == 2


def test_positions_on_a_grid_fit_what_twins_are_fed():
    twin = shrink(default_config("reformer"))
    assert sum(twin.axial_pos_embds_dim) == twin.hidden_size and len(twin.axial_pos_embds_dim) == 2
    assert tuple(twin.axial_pos_shape) == (1, TOKENS)


def test_pictures_of_thousands_of_patches_become_small():
    assert shrink(SamConfig()).vision_config.image_size == 256
    assert shrink(AutoConfig.for_model("vit")).image_size == 224


def test_a_width_of_0_stays_0():
    assert shrink(default_config("gemma4_assistant")).text_config.hidden_size_per_layer_input == 0


def test_a_language_model_inside_a_larger_configuration_is_found():
    config = causal_twin("musicgen")
    with torch.device("meta"):
        assert type(build(config).config) is type(config.decoder)


class OldConfig(PretrainedConfig):
    """As code on the hub has them: an __init__ of its own, and what it works out is kept beside what it was given."""

    model_type = "old"

    def __init__(self, hidden_size=1024, num_layers=24, num_attention_heads=16, **kwargs):
        self.hidden_size, self.num_layers, self.num_attention_heads = hidden_size, num_layers, num_attention_heads
        self.kv_channels = hidden_size // num_attention_heads
        self.wide_residual = kwargs.pop("wide_residual", False)
        super().__init__(**kwargs)


def test_a_configuration_with_an_init_of_its_own_keeps_what_it_was_given():
    twin = shrink(OldConfig(wide_residual=True))
    assert (twin.hidden_size, twin.num_layers, twin.num_attention_heads, twin.kv_channels) == (64, 2, 4, 16)
    assert twin.wide_residual
