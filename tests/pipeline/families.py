"""Small models of families that a pipeline cuts, of four blocks and more, with every parameter at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

from colonnade.model.twin import with_noise

_SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
_WIDE = _SIZES | {"intermediate_size": 32}
_CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GROUPED = _WIDE | {"num_key_value_heads": 1, "max_position_embeddings": 64}


def _llama(**fields: Any) -> Any:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**_GROUPED, **fields))


def _gemma3() -> Any:
    config = tf.Gemma3TextConfig(**_GROUPED | {"num_hidden_layers": 6}, head_dim=8, sliding_window=5)
    return tf.Gemma3ForCausalLM(config)


def _falcon(**fields: Any) -> Any:
    config = tf.FalconConfig(**_SIZES, hidden_dropout=0.0, attention_dropout=0.0, **fields)
    return tf.FalconForCausalLM(config)


def _t5() -> Any:
    config = tf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0)
    return tf.T5ForConditionalGeneration(config)


def _whisper() -> Any:
    return tf.WhisperForConditionalGeneration(
        tf.WhisperConfig(
            vocab_size=64,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_source_positions=10,
            max_target_positions=32,
            num_mel_bins=8,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    )


def _mixtral(**fields: Any) -> Any:
    model = tf.MixtralForCausalLM(tf.MixtralConfig(**_GROUPED, num_local_experts=3, **fields))
    model.set_experts_implementation("eager")  # the grouped product of experts does not exist in double precision
    return model


def _vit() -> Any:
    sizes = {name: size for name, size in _WIDE.items() if name != "vocab_size"}
    return tf.ViTForImageClassification(tf.ViTConfig(**sizes, **_CALM, image_size=16, patch_size=8))


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama, tied": lambda: _llama(tie_word_embeddings=True),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_GROUPED, head_dim=8)),
    "gemma3": _gemma3,
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=64, n_embd=16, n_layer=4, n_head=2, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    ),
    "falcon, rotary": _falcon,
    "falcon, alibi": lambda: _falcon(alibi=True),
    "bloom": lambda: tf.BloomForCausalLM(
        tf.BloomConfig(vocab_size=64, hidden_size=16, n_layer=4, n_head=2, hidden_dropout=0.0, attention_dropout=0.0)
    ),
    "mixtral": _mixtral,
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**_WIDE, **_CALM)),
    "albert": lambda: tf.AlbertForMaskedLM(tf.AlbertConfig(**_WIDE, **_CALM, embedding_size=8)),
    "t5": _t5,
    "whisper": _whisper,
    "vit": _vit,
}
REFUSED: dict[str, Callable[[], Any]] = {"mixtral with router loss": lambda: _mixtral(output_router_logits=True)}


def family(name: str) -> Any:
    """A model by name, in double precision, training; the same weights at every call."""
    return with_noise((FAMILIES | REFUSED)[name]()).double()
