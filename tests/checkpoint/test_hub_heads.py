"""Key/value heads that are fewer than the ranks, and heads that do not divide: saved once, loaded into any layout."""

from math import prod

import pytest
import torch
from hub_models import assert_holds_its_boxes, build
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.comm.ledger import ledger
from colonnade.testing.ranks import run_on_ranks

SHAPES = {
    "1 key/value head": {"num_key_value_heads": 1},
    "2 key/value heads": {"num_key_value_heads": 2},
    "2 key/value heads with 6 to read them": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
    "biases": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "9 heads on 3": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
}


def boosted(tp, changes):
    booster = Booster(plugin=HybridParallelPlugin(tp_size=tp, precision="fp32"))
    model, *_ = booster.boost(build("llama", **changes))
    return booster, model


def save_on_four(path, changes):
    """Elements that this rank sends for the files, after which every layout of four ranks loads them."""
    booster, model = boosted(4, changes)
    with ledger() as book:
        booster.save_model(model, path)
    whole = build("llama", **changes)
    for tp in (4, 2, 1):
        booster, model = boosted(tp, changes)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        booster.load_model(model, path)
        assert_holds_its_boxes(model.unwrap(), whole)
    return book.elements["send", "world"], book.elements["receive", "world"]


@pytest.mark.parametrize("label", SHAPES)
def test_what_four_ranks_save_is_the_model_and_loads_into_every_layout(label, tmp_path):
    changes = SHAPES[label]
    traffic = run_on_ranks(4, save_on_four, tmp_path / "model", changes)
    original = build("llama", **changes)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert saved.keys() == original.state_dict().keys()
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, value in original.state_dict().items():
        assert torch.equal(saved[name], value) and torch.equal(loaded.state_dict()[name], value), name
    sent = [elements for elements, _ in traffic]
    assert sum(sent) == traffic[0][1], "what is sent is what the first rank receives"


def test_heads_that_several_ranks_hold_are_sent_once(tmp_path):
    """Two key/value heads on four ranks: of k_proj and v_proj rank 2 sends the second head, ranks 1 and 3 send nothing."""
    (_, received), *others = run_on_ranks(4, save_on_four, tmp_path / "model", SHAPES["2 key/value heads"])
    shapes = {name: p.shape for name, p in build("llama", num_key_value_heads=2).named_parameters()}
    keys = sum(prod(shape) for name, shape in shapes.items() if "k_proj" in name or "v_proj" in name)
    split = sum(prod(shape) for shape in shapes.values() if len(shape) > 1) - keys
    assert [sent for sent, _ in others] == [split // 4, split // 4 + keys // 2, split // 4]
    assert received == 3 * split // 4 + keys // 2
