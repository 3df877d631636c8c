"""OPT: the feed-forward layers stand in the decoder layer itself, and the head count in the attention's views."""

from colonnade.shardformer.policy import Policy, Spine
from colonnade.shardformer.words import col, lm_head, norm, row, shrink, vocab_embedding

HEADS = "num_attention_heads"


class OPTPolicy(Policy):
    families = {"opt": "OPT"}
    spine = Spine(
        base="model.decoder",
        embed=("embed_tokens", "embed_positions", "project_in"),
        blocks="layers",
        norm="final_layer_norm",
        head="lm_head",
    )

    def module_policy(self):
        attention = col("q_proj", "k_proj", "v_proj", units=HEADS) + row("out_proj", units=HEADS)
        return {
            "OPTAttention": attention + shrink("num_heads"),
            "OPTDecoderLayer": col("fc1") + row("fc2") + norm("self_attn_layer_norm", "final_layer_norm"),
            "OPTDecoder": vocab_embedding("embed_tokens") + norm("final_layer_norm", optional=True),
            "OPTForCausalLM": lm_head("lm_head"),
        }
