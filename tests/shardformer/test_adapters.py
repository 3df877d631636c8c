"""Adapters of peft around every linear layer of models whose policy is inferred."""

import peft
import pytest
import torch
from inferred_families import build

from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.testing.parity import assert_same_as_single
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids


def adapted(family):
    """A model without a policy file, with an adapter that is not zero around every linear layer but the head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(build(family), options)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_" in key:
                    parameter.copy_(0.2 * torch.randn(parameter.shape))
    return model.train()


def train(family, tp_size):
    x = ids(4, 12, 7, 67)
    assert_same_as_single(
        lambda: adapted(family),
        [{"input_ids": x, "labels": x}],
        lambda: HybridParallelPlugin(tp_size=tp_size, precision="fp32", max_norm=0.5),
        steps=2,
        max_norm=0.5,
    )


FAMILIES = {
    "phi3": "fused qkv of unequal parts, fused gate and up",
    "gpt_neox": "qkv fused head by head",
    "deepseek_v3": "low-rank stages outside the region, columns behind them",
    "gpt_oss": "experts that stay as they are",
    "bloom": "biases by distance",
    "gemma3_text": "an embedding that scales itself",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_an_inferred_family_train_as_plain_peft_does(family):
    run_on_ranks(2, train, family, 2)


@pytest.mark.parametrize("family", ["phi3", "deepseek_v3"])
def test_on_four_ranks(family):
    run_on_ranks(4, train, family, 4)
