"""The configuration that stands for a model type where only the type is given.

Mostly it is what the family's configuration class makes without arguments. Where that makes no model, or none that learns
from token ids, the fields it lacks are filled in as the family's published models have them. Nothing that the class
does set by itself is changed, but for what its own checks refuse.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_QWEN4_INDEXER = {
    "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}  # fmt: skip

# model type: fields that its configuration class leaves out, and what is so without them
MISSING_FIELDS: dict[str, dict[str, Any]] = {
    # no token that stands for a picture
    "blip-2": {"image_token_index": 50265},
    # no rotary parameters for the one kind of layers it has
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [24, 20, 20]}
        }
    },
    # attention reads the rotary base from attn_config, which does not declare it, and clips to a limit of None
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8}},
    # how many experts a token takes is None
    "deepseek_v2": {"num_experts_per_tok": 6},
    # layers of experts without a number of experts
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    # an assistant may have no inputs of its own for each layer, and the text model it is made of has them
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    # a head width of None
    "hunyuan_v1_dense": {"head_dim": 128},
    # a head width of None, and a single expert
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    # kinds of layers are None
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    # a head width of None
    "ministral": {"head_dim": 128},
    # a number of key/value heads of None
    "nemotron": {"num_key_value_heads": 8},
    # layers with an index, and no sizes for the index
    "qwen4_exp": {"text_config": _QWEN4_INDEXER},
    "qwen4_exp_text": _QWEN4_INDEXER,
    # a reformer is a language model only as a decoder
    "reformer": {"is_decoder": True},
    # adapters by language, and none of them chosen
    "xmod": {"default_language": "en_XX"},
}


def default_config(model_type: str) -> PretrainedConfig:
    """The configuration of a model type at its family's own size; see the module.

    Raises:
        ValueError: transformers has no such type.
    """
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **copy.deepcopy(MISSING_FIELDS.get(model_type, {})))
