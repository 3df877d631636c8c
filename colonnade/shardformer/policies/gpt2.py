"""GPT-2: q, k and v share one transposed weight, so its columns are split in three pieces."""

from colonnade.shardformer.policy import Policy, Spine
from colonnade.shardformer.words import col, lm_head, norm, row, shrink, vocab_embedding

HEADS = "num_attention_heads"


class GPT2Policy(Policy):
    families = {"gpt2": "GPT2"}
    spine = Spine(base="transformer", embed=("wte", "wpe"), blocks="h", norm="ln_f", head="lm_head")

    def module_policy(self):
        attention = col("c_attn", pieces=3, units=HEADS) + row("c_proj", units=HEADS)
        # the forward splits c_attn's output by this width
        attention += shrink("split_size", units=HEADS)
        return self._attentions(attention) | {
            "GPT2MLP": col("c_fc") + row("c_proj"),
            "GPT2Block": norm("ln_1", "ln_2") + norm("ln_cross_attn", optional=True),
            "GPT2Model": vocab_embedding("wte") + norm("ln_f"),
            "GPT2LMHeadModel": lm_head("lm_head"),
            "GPT2DoubleHeadsModel": lm_head("lm_head"),
        }

    def _attentions(self, attention):
        """By class; by path where a decoder also attends to an encoder: that is the same class with other layers."""
        cross = col("q_attn", units=HEADS) + col("c_attn", pieces=2, units=HEADS) + row("c_proj", units=HEADS)
        cross += shrink("split_size", units=HEADS)
        found = {path: m for path, m in self.model.named_modules() if hasattr(m, "is_cross_attention")}
        if not any(m.is_cross_attention for m in found.values()):
            return {"GPT2Attention": attention}
        return {path: cross if m.is_cross_attention else attention for path, m in found.items()}
