"""The rows of docs/models.md: which classes of models, and which variants of their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CAUSAL, OTHERS, VARIANTS, FORCED = "causal", "others", "variants", "without files"


@dataclass(frozen=True)
class Case:
    """A model to look at.

    Args:
        family: transformers' model type; "own" for a model of tests/shardformer/models_of_our_own.py.
        model: name of the class; for one of our own, its name there.
        section: where its row goes.
        title: of a variant: what is special about it.
        changes: fields that differ from the family's default configuration.
        forced: infer its policy also where the family has a file.
    """

    family: str
    model: str
    section: str = CAUSAL
    title: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    forced: bool = False

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells it from other cases."""
        return self.section, self.family, self.model, self.title


# Fields of default configurations that would make the twin slow, or blind to one of its inputs.
CHANGES: dict[str, dict[str, Any]] = {
    "blip-2": {"image_token_index": 60},
    "gemma3": {"mm_tokens_per_image": 49},
    "got_ocr2": {"vision_config": {"image_size": 128}},
    "sam": {"vision_config": {"image_size": 64}, "prompt_encoder_config": {"image_size": 64}},
    "sam_vision_model": {"image_size": 64},
}

# class: its family
OTHER_CLASSES = {
    "AlbertForMaskedLM": "albert",
    "BartForConditionalGeneration": "bart",
    "BertForMaskedLM": "bert",
    "BertForSequenceClassification": "bert",
    "BertForTokenClassification": "bert",
    "Blip2ForConditionalGeneration": "blip-2",
    "Blip2QFormerModel": "blip_2_qformer",
    "Blip2VisionModel": "blip_2_vision_model",
    "CLIPModel": "clip",
    "CLIPTextModel": "clip_text_model",
    "CLIPVisionModel": "clip_vision_model",
    "DebertaV2ForMaskedLM": "deberta-v2",
    "Dinov2Model": "dinov2",
    "DistilBertForMaskedLM": "distilbert",
    "ElectraForMaskedLM": "electra",
    "LlavaForConditionalGeneration": "llava",
    "MT5ForConditionalGeneration": "mt5",
    "ModernBertForMaskedLM": "modernbert",
    "PegasusForConditionalGeneration": "pegasus",
    "RobertaForMaskedLM": "roberta",
    "SamModel": "sam",
    "SamVisionModel": "sam_vision_model",
    "SiglipModel": "siglip",
    "SiglipVisionModel": "siglip_vision_model",
    "T5EncoderModel": "t5",
    "T5ForConditionalGeneration": "t5",
    "ViTForImageClassification": "vit",
    "ViTModel": "vit",
    "WhisperForConditionalGeneration": "whisper",
    "XLMRobertaForMaskedLM": "xlm-roberta",
}
ODD_CLASSES = {"num_labels": 5}  # a number of classes that ranks cannot share out evenly

_FALCON = {"num_attention_heads": 64, "hidden_size": 4096}
_ONE_KV = _FALCON | {"multi_query": True, "new_decoder_architecture": False}
_GROUPED = _FALCON | {"num_kv_heads": 8, "new_decoder_architecture": True}
_EACH_ITS_OWN = _FALCON | {"multi_query": False, "new_decoder_architecture": False}

# family: (title, fields that differ from the default configuration)
VARIANT_FIELDS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "llama": [
        ("biases in attention and MLP", {"attention_bias": True, "mlp_bias": True}),
        ("tied head", {"tie_word_embeddings": True}),
        ("1 key/value head", {"num_key_value_heads": 1}),
        ("2 key/value heads", {"num_key_value_heads": 2}),
        ("9 heads, 3 key/value heads", {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}),
        ("heads wider than their share", {"head_dim": 256}),
    ],
    "qwen2": [("sliding window", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 16})],
    "qwen3": [
        ("biases in attention", {"attention_bias": True}),
        ("1 key/value head", {"num_key_value_heads": 1}),
    ],
    "mistral": [("no window", {"sliding_window": None})],
    "gemma": [("1 key/value head", {"num_key_value_heads": 1})],
    "gemma2": [
        ("no capping", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("head of its own", {"tie_word_embeddings": False}),
    ],
    "phi": [("norms of queries and keys", {"qk_layernorm": True})],
    "phi3": [("8 key/value heads", {"num_key_value_heads": 8})],
    "stablelm": [
        ("norms of queries and keys", {"qk_layernorm": True}),
        ("biases of queries, keys, values", {"use_qkv_bias": True}),
        ("parallel residual", {"use_parallel_residual": True}),
    ],
    "cohere": [
        ("norms of queries and keys", {"use_qk_norm": True}),
        ("8 key/value heads, biases", {"num_key_value_heads": 8, "attention_bias": True}),
    ],
    "olmo": [("clipped queries, keys, values", {"clip_qkv": 1.0})],
    "olmo2": [("4 key/value heads", {"num_key_value_heads": 4})],
    "olmoe": [("clipped queries, keys, values", {"clip_qkv": 1.0})],
    "falcon": [
        ("1 key/value head", _ONE_KV),
        ("1 key/value head, ALiBi", _ONE_KV | {"alibi": True}),
        ("1 key/value head, sequential, biases", _ONE_KV | {"parallel_attn": False, "bias": True}),
        ("1 key/value head, sequential, ALiBi", _ONE_KV | {"parallel_attn": False, "alibi": True}),
        ("grouped layout", _GROUPED),
        ("grouped layout, ALiBi", _GROUPED | {"alibi": True}),
        ("grouped layout, one norm", _GROUPED | {"num_ln_in_parallel_attn": 1}),
        ("layout [head, 3, width]", _EACH_ITS_OWN),
        ("layout [head, 3, width], ALiBi", _EACH_ITS_OWN | {"alibi": True}),
        ("layout [head, 3, width], sequential", _EACH_ITS_OWN | {"parallel_attn": False, "bias": True}),
    ],
    "gpt_bigcode": [("1 key/value head", {"multi_query": True}), ("every head its own", {"multi_query": False})],
    "bloom": [("residual after the norm", {"apply_residual_connection_post_layernorm": True})],
    "mpt": [
        ("no ALiBi", {"attn_config": {"alibi": False}}),
        ("norms of queries and keys", {"attn_config": {"qk_ln": True}}),
        ("clipped queries, keys, values", {"attn_config": {"clip_qkv": 1.0}}),
    ],
    "gpt_neox": [
        ("no biases in attention", {"attention_bias": False}),
        ("sequential residual", {"use_parallel_residual": False}),
        ("tied head", {"tie_word_embeddings": True}),
    ],
    "gpt2": [
        ("cross-attention", {"add_cross_attention": True}),
        ("head of its own", {"tie_word_embeddings": False}),
        ("scaled by layer", {"scale_attn_by_inverse_layer_idx": True}),
    ],
    "gptj": [("tied head", {"tie_word_embeddings": True})],
    "codegen": [("tied head", {"tie_word_embeddings": True})],
    "starcoder2": [("no biases", {"use_bias": False})],
    "qwen2_moe": [("experts in every second layer, no biases", {"decoder_sparse_step": 2, "qkv_bias": False})],
    "mixtral": [("1 key/value head, router loss", {"num_key_value_heads": 1, "output_router_logits": True})],
    "opt": [
        ("narrow embedding", {"hidden_size": 1024, "num_attention_heads": 16, "word_embed_proj_dim": 512}),
        ("norms after", {"do_layer_norm_before": False}),
        (
            "narrow embedding, norms after",
            {"hidden_size": 1024, "num_attention_heads": 16, "word_embed_proj_dim": 512, "do_layer_norm_before": False},
        ),
        ("no biases, plain norms", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
        ("head of its own", {"tie_word_embeddings": False}),
    ],
    "bert": [("cross-attention", {"add_cross_attention": True}), ("head of its own", {"tie_word_embeddings": False})],
    "persimmon": [("no norms of queries and keys", {"qk_layernorm": False})],
    "fuyu": [("no norms of queries and keys", {"text_config": {"model_type": "persimmon", "qk_layernorm": False}})],
    "glm": [("no biases, tied head", {"attention_bias": False, "tie_word_embeddings": True})],
    "glm4": [("biases in attention", {"attention_bias": True})],
    "gpt_oss": [("no biases in attention", {"attention_bias": False})],
    "deepseek_v2": [
        ("whole queries", {"q_lora_rank": None}),
        ("dense first layer", {"first_k_dense_replace": 1}),
    ],
    "deepseek_v3": [("whole queries", {"q_lora_rank": None}), ("biases in attention", {"attention_bias": True})],
    "granite": [
        (
            "multipliers, biases",
            {
                "embedding_multiplier": 12.0,
                "logits_scaling": 8.0,
                "residual_multiplier": 0.22,
                "attention_multiplier": 0.0156,
                "attention_bias": True,
                "mlp_bias": True,
            },
        )
    ],
    "smollm3": [("head of its own", {"tie_word_embeddings": False})],
}

# (class, title, fields)
VARIANT_CLASSES: list[tuple[str, str, dict[str, Any]]] = [
    ("T5ForConditionalGeneration", "gated, head of its own (v1.1)", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ("T5ForConditionalGeneration", "gated, tied head", {"feed_forward_proj": "gated-gelu"}),
    ("T5ForConditionalGeneration", "head of its own", {"tie_word_embeddings": False}),
    ("ModernBertForMaskedLM", "biases", {"attention_bias": True, "mlp_bias": True}),
    ("BertForSequenceClassification", "7 classes, post-norm encoder", {"num_labels": 7}),
    ("ViTForImageClassification", "no biases of queries, keys, values", {"qkv_bias": False}),
    ("Dinov2Model", "gated", {"use_swiglu_ffn": True}),
    ("SamVisionModel", "no relative positions", {"image_size": 64, "use_rel_pos": False}),
    ("BartForConditionalGeneration", "head of its own", {"tie_word_embeddings": False}),
]  # fmt: skip

# (name in models_of_our_own.py, title, its sizes)
OWN_MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("sequence-first", "remote code like ChatGLM2: fused multi-query, packed SwiGLU, sequence first", {}),
    ("sequence-first", "the same without biases, one key/value head", {"multi_query_group_num": 1, "add_qkv_bias": False}),
    ("small-gpt", "plain module: fused qkv, tied head, (logits, loss)", {}),
    ("small-gpt", "plain module without biases", {"bias": False}),
    ("grouped", "plain module: grouped keys, gated MLP, logits alone", {}),
    ("grouped", "plain module with one key/value head", {"n_kv_heads": 1}),
]  # fmt: skip


def all_cases(with_file: frozenset[str]) -> list[Case]:
    """Every row, in the order in which they are looked at.

    Args:
        with_file: families for which a policy has been written; they are looked at a second time without it.
    """
    causal = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    cases = [Case(family, model, CAUSAL, changes=CHANGES.get(family, {})) for family, model in causal]
    cases += [Case(f, m, FORCED, changes=CHANGES.get(f, {}), forced=True) for f, m in causal if f in with_file]
    cases += [_other(name, family) for name, family in OTHER_CLASSES.items()]
    for family, variants in VARIANT_FIELDS.items():
        model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
        cases += [Case(family, model, VARIANTS, title, fields) for title, fields in variants]
        if family in with_file:
            cases += [Case(family, model, FORCED, title, fields, forced=True) for title, fields in variants]
    cases += [Case(OTHER_CLASSES[name], name, VARIANTS, title, fields) for name, title, fields in VARIANT_CLASSES]
    return cases + [Case("own", name, VARIANTS, title, sizes) for name, title, sizes in OWN_MODELS]


def _other(name: str, family: str) -> Case:
    changes = CHANGES.get(family, {}) | (ODD_CLASSES if name.endswith("Classification") else {})
    return Case(family, name, OTHERS, changes=changes)
