"""Tiny models of families that have no policy file, one for each kind of structure that inference has to see."""

import torch
import transformers

_SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT = {
    "vocab_size": 67,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_DROP = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def small(**changes):
    """The common sizes with some changed; None leaves a size out."""
    return {key: value for key, value in (_SMALL | changes).items() if value is not None}


# family: (configuration, structure that makes it worth a test)
FAMILIES = {
    "gemma2": (small(head_dim=8, sliding_window=8, query_pre_attn_scalar=8), "norms of 1 + weight, capped logits"),
    "gemma3_text": (
        small(
            head_dim=8,
            sliding_window=8,
            query_pre_attn_scalar=8,
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        "norms per head, an embedding that scales itself",
    ),
    "phi3": (
        small(resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0),
        "fused qkv of unequal parts, fused gate and up",
    ),
    "glm": (small(head_dim=8), "fused gate and up"),
    "gpt_neox": (small(num_key_value_heads=None, hidden_dropout=0.0, attention_dropout=0.0), "qkv fused head by head"),
    "gpt_neo": (
        {
            "vocab_size": 67,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
            "max_position_embeddings": 64,
            "intermediate_size": 48,
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "head counts in a view",
    ),
    "gptj": (
        _GPT | _NO_DROP | {"rotary_dim": 4, "tie_word_embeddings": False},
        "one norm for attention and MLP, a head bias",
    ),
    "codegen": (
        _GPT | _NO_DROP | {"n_ctx": 64, "rotary_dim": 4, "tie_word_embeddings": False},
        "qkv fused in four parts",
    ),
    "cohere": (small(), "parallel residual, scaled logits"),
    "apertus": (small(), "parameters in the activation"),
    "gpt_oss": (
        small(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
        "sinks per head, experts",
    ),
    "qwen3_moe": (
        small(head_dim=8, decoder_sparse_step=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        "experts that stay whole",
    ),
    "olmo2": (small(), "norms over all heads: attention stays whole"),
    "deepseek_v3": (
        small(
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
        ),
        "low-rank attention that stays whole",
    ),
    "bloom": (
        {
            "vocab_size": 67,
            "hidden_size": 32,
            "n_layer": 2,
            "n_head": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "position biases made for all heads: attention stays whole",
    ),
    "bert": (
        {
            "vocab_size": 67,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": 64,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "is_decoder": True,
        },
        "a layer's parts in several modules, a tied bias in the head",
    ),
}


def build(family):
    """The same model of a family at every call, on every rank; every parameter of it matters."""
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family][0])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if getattr(model.config, "_experts_implementation", None):
        model.config._experts_implementation = "batched_mm"
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.config.use_cache = False
    return model
