"""Tiny Hugging Face models of several families, with weights that let no fault hide, and inputs for them.

A fresh Hugging Face model has every bias 0, every norm weight 1 and nearly uniform logits, so that a doubled bias or a
lost mask changes nothing. Noise on every parameter makes each of them matter.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

NOISE = 0.15

_LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
_MIXTRAL = _LLAMA | {
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.05,
}
_GPT2 = {
    "vocab_size": 64,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
_OPT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "layerdrop": 0.0,
}

# name: (model class, its configuration)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "LL": ("LlamaForCausalLM", _LLAMA),
    "LT": ("LlamaForCausalLM", _LLAMA | {"tie_word_embeddings": True}),
    "llama-gqa8": ("LlamaForCausalLM", _LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "G2": ("GPT2LMHeadModel", _GPT2),
    "OP": ("OPTForCausalLM", _OPT),
    "MX": ("MixtralForCausalLM", _MIXTRAL),
    "MX8": ("MixtralForCausalLM", _MIXTRAL | {"num_local_experts": 8}),
    "mistral": ("MistralForCausalLM", _LLAMA | {"num_hidden_layers": 2}),
    "qwen2": ("Qwen2ForCausalLM", _LLAMA | {"num_hidden_layers": 2}),
    "qwen3": ("Qwen3ForCausalLM", _LLAMA | {"num_hidden_layers": 2, "head_dim": 8}),
}


def tiny_config(name: str, **config_overrides: Any) -> transformers.PretrainedConfig:
    """Configuration of a tiny model: no cache, every dropout 0 unless overridden.

    Args:
        name: a key of `TINY`. LL is Llama, LT Llama with tied embeddings, llama-gqa8 Llama with 8 heads on 4 key/value
            heads, G2 GPT-2, OP OPT, MX Mixtral with 4 experts, MX8 with 8; the others are called by their family.
        config_overrides: entries of the configuration, such as `vocab_size=67`.
    """
    if name not in TINY:
        raise ValueError(f"there is no tiny model {name!r}; there are {', '.join(TINY)}.")
    class_name, options = TINY[name]
    return getattr(transformers, class_name).config_class(**{"use_cache": False} | options | config_overrides)


def tiny_model(name: str, *, noise_seed: int = 1, **config_overrides: Any) -> transformers.PreTrainedModel:
    """A tiny model in training mode, the same weights at every call; the caller's random state is left as it was.

    Built after `torch.manual_seed(0)`; then `NOISE` × a standard normal is added to every entry of
    `named_parameters()`, in that order, from one generator.

    Args:
        name, config_overrides: as for `tiny_config`.
        noise_seed: seed of that generator; another one gives other weights.
    """
    config = tiny_config(name, **config_overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, TINY[name][0])(config)
    generator = torch.Generator().manual_seed(noise_seed)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator))
    return model


def ids(batch: int, seq: int, seed: int = 7, vocab: int = 64) -> torch.Tensor:
    """Random token ids, batch × seq, the same at every call with the same arguments."""
    return torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))
