"""A written policy whose attention norms all its heads together: split like the heads, as right as one process."""

import pytest
import torch
from transformers import Olmo2Config, Olmo2ForCausalLM

from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.shardformer import Policy, Spine, col, lm_head, row, split_norm, vocab_embedding
from colonnade.testing.parity import assert_same_as_single
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids

KV, HEADS = "num_key_value_heads", "num_attention_heads"


class Olmo2Policy(Policy):
    families = {"olmo2": "Olmo2"}
    spine = Spine(base="model", embed="embed_tokens", blocks="layers", norm="norm", head="lm_head")

    def module_policy(self):
        attention = col("q_proj", units=KV, heads=HEADS) + col("k_proj", "v_proj", units=KV)
        norms = split_norm("q_norm", units=KV, heads=HEADS) + split_norm("k_norm", units=KV)
        return {
            "Olmo2Attention": attention + row("o_proj", units=KV, heads=HEADS) + norms,
            "Olmo2MLP": col("gate_proj", "up_proj") + row("down_proj"),
            "Olmo2Model": vocab_embedding("embed_tokens"),
            "Olmo2ForCausalLM": lm_head("lm_head"),
        }


def olmo2(heads, kv_heads):
    torch.manual_seed(0)
    config = Olmo2Config(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=8, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = Olmo2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def train(world, heads, kv_heads):
    batches = [{"input_ids": ids(2, 12, seed=s, vocab=67), "labels": ids(2, 12, seed=s, vocab=67)} for s in (7, 8)]
    assert_same_as_single(
        lambda: olmo2(heads, kv_heads), batches,
        lambda: HybridParallelPlugin(tp_size=world, precision="fp32", max_norm=1.0, custom_policy=Olmo2Policy()),
        steps=3, max_norm=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("world, heads, kv_heads", [(2, 4, 2), (2, 4, 1), (4, 4, 2), (3, 6, 2)])
def test_norms_over_all_heads_train_as_in_one_process(world, heads, kv_heads):
    run_on_ranks(world, train, world, heads, kv_heads)
