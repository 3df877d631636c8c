"""GPT-2: q, k and v share one transposed weight, so its columns are split in three pieces."""

from colonnade.shardformer.policy import Policy, PolicyError, Spine
from colonnade.shardformer.words import col, lm_head, norm, row, shrink, vocab_embedding

HEADS = "num_attention_heads"


class GPT2Policy(Policy):
    families = {"gpt2": "GPT2"}
    spine = Spine(base="transformer", embed=("wte", "wpe"), blocks="h", norm="ln_f", head="lm_head")

    def config_sanity_check(self):
        if getattr(self.model.config, "add_cross_attention", False):
            raise PolicyError(
                "GPT2Policy does not cover cross attention (config.add_cross_attention): its c_attn holds k and v only."
            )

    def module_policy(self):
        attention = col("c_attn", pieces=3, units=HEADS) + row("c_proj", units=HEADS)
        return {
            # the forward splits c_attn's output by this width
            "GPT2Attention": attention + shrink("split_size", units=HEADS),
            "GPT2MLP": col("c_fc") + row("c_proj"),
            "GPT2Block": norm("ln_1", "ln_2"),
            "GPT2Model": vocab_embedding("wte") + norm("ln_f"),
            "GPT2LMHeadModel": lm_head("lm_head"),
            "GPT2DoubleHeadsModel": lm_head("lm_head"),
        }
