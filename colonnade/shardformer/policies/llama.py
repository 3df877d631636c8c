"""Llama, and the models whose blocks carry the same names."""

from colonnade.shardformer.policy import Policy, Spine
from colonnade.shardformer.words import col, head_norm, lm_head, norm, ratio, row, vocab_embedding

KEYS, HEADS = "num_key_value_heads", "num_attention_heads"


class LlamaPolicy(Policy):
    families = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    spine = Spine(base="model", embed="embed_tokens", blocks="layers", norm="norm", head="lm_head")

    def module_policy(self):
        name = self.family
        queries = col("q_proj", units=KEYS, heads=HEADS) + row("o_proj", units=KEYS, heads=HEADS)
        keys = col("k_proj", "v_proj", units=KEYS) + ratio("num_key_value_groups", units=KEYS, heads=HEADS)
        attention = queries + keys
        return {
            f"{name}Attention": attention + head_norm("q_norm", "k_norm", optional=True),
            f"{name}MLP": col("gate_proj", "up_proj") + row("down_proj"),
            f"{name}DecoderLayer": norm("input_layernorm", "post_attention_layernorm"),
            f"{name}Model": vocab_embedding("embed_tokens") + norm("norm"),
            f"{name}ForCausalLM": lm_head("lm_head"),
        }
