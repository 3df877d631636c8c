"""Models × layouts: the numbers of one process.

Every run has a vocabulary of 67, unequal target tokens on the data-parallel ranks, and clipping that bites.
"""

import parity_runs
import pytest
from parity_runs import LAYOUTS, MAX_NORM, plain, run, run_each, unequal, world

from colonnade.testing.ranks import run_on_ranks

MODELS = ["LL", "LT", "qwen3", "qwen2", "mistral", "G2", "OP"]


@pytest.mark.parametrize("layout", ["tp 2", "dp 2", "ddp 2", "tp 2 × dp 2"])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_with_the_numbers_of_one_process(name, layout):
    run_on_ranks(world(layout), run, layout, name, unequal(), max_norm=MAX_NORM)


@pytest.mark.parametrize("name", ["llama-gqa8", "G2"])
def test_four_tensor_parallel_ranks(name):
    run_on_ranks(4, run, "tp 4", name, unequal(), max_norm=MAX_NORM)


def test_variants_of_the_models():
    """Details of a configuration that change which layers there are or what they compute."""
    batches = unequal()
    cases = {
        "llama with biases": {"name": "LL", "overrides": {"attention_bias": True, "mlp_bias": True}},
        "llama, one kv head for each head": {"name": "LL", "overrides": {"num_key_value_heads": 4}},
        "llama, heads wider than the model": {"name": "LL", "overrides": {"head_dim": 16}},
        "llama, a padding token": {"name": "LT", "overrides": {"pad_token_id": 66}},
        "qwen2, tied": {"name": "qwen2", "overrides": {"tie_word_embeddings": True}},
        "mistral, a sliding window": {"name": "mistral", "overrides": {"sliding_window": 4}},
        "gpt2, untied": {"name": "G2", "overrides": {"tie_word_embeddings": False}},
        "gpt2, another width inside": {"name": "G2", "overrides": {"n_inner": 48}},
        "opt, norms after the blocks": {"name": "OP", "overrides": {"do_layer_norm_before": False}},
        "opt, projections around the blocks": {"name": "OP", "overrides": {"word_embed_proj_dim": 16}},
        "opt, no biases": {"name": "OP", "overrides": {"enable_bias": False}},
        "llama, eager attention": {"name": "LL", "overrides": {"attn_implementation": "eager"}},
    }
    run_on_ranks(2, run_each, "tp 2", {k: v | {"batches": batches, "steps": 2} for k, v in cases.items()})


def test_four_whole_layers_and_five_steps():
    """The tiny models as they are, without what the matrix adds."""
    for layout in ("tp 2", "dp 2, small buckets"):
        overrides = {"vocab_size": 64, "num_hidden_layers": 4}
        batches = [{k: v % 64 for k, v in batch.items()} for batch in plain()]
        run_on_ranks(2, run, layout, "LL", batches, overrides=overrides, steps=5)


def test_layouts_here_are_what_their_names_say():
    for name, (ranks, _, options) in LAYOUTS.items():
        assert ranks % options.get("tp_size", 1) == 0, name
    assert parity_runs.VOCAB % 2 and parity_runs.VOCAB % 4
