"""PIPE-1 and PIPE-2: every layer is on one stage, however many there are, and every stage sees masks and positions."""

import re

import pytest
import torch
from field_cases import GRADIENT, IGNORED, LOSS, Boosted, Single, assert_close, make_plugin, whole_batch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from colonnade.booster import Booster
from colonnade.comm.collectives import all_gather_object
from colonnade.errors import ConfigError
from colonnade.pipeline.schedule import STYLES
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

CHUNKED = [style for style, found in STYLES.items() if found.most_chunks != 1]


def layers_of(names):
    return sorted({int(number) for name in names for number in re.findall(r"layers\.(\d+)\.", name)})


def uneven(plugin, layers, folder, options):
    """Loss, gradients, and the numbers of the layers that this rank holds; the saved model is in the folder."""
    run = Boosted(plugin, tiny_model("LL", num_hidden_layers=layers), **{"num_microbatches": 4} | options)
    loss = run.pipeline(whole_batch())
    held = layers_of(name for name, _ in run.user.named_parameters())
    run.booster.save_model(run.model, folder, shard=True, size_per_shard="20KB")
    return loss, run.gradients_by_step(), held


UNEVEN = {
    "5 layers, pp 2": (2, "pp2", 5, 4.596096, {}),
    "7 layers, pp 4": (4, "pp4", 7, 4.580981, {}),
    "5 layers, tp 2 × pp 2": (4, "pp2, tp2", 5, 4.596096, {}),
    "5 layers, pp 2, gpipe": (2, "pp2", 5, 4.596096, {"pp_style": "gpipe"}),
    "5 layers, pp 2, chosen": (2, "pp2", 5, 4.596096, {"num_layers_per_stage": [1, 4]}),
} | {f"5 layers, pp 2, {style}": (2, "pp2", 5, 4.596096, {"pp_style": style}) for style in CHUNKED}


@pytest.mark.parametrize("case", UNEVEN)
def test_no_layer_is_lost_and_none_is_there_twice(case, tmp_path):
    world, plugin, layers, loss, options = UNEVEN[case]
    one = Single(tiny_model("LL", num_hidden_layers=layers)).step(whole_batch())
    assert one.losses[0] == pytest.approx(loss, abs=1e-6)
    answers = run_on_ranks(world, uneven, plugin, layers, tmp_path / "model", options)
    for found, gradients, _ in answers:
        assert found == pytest.approx(loss, abs=LOSS)
        assert_close(gradients, one.gradients, GRADIENT)
    stages = sorted({tuple(held) for *_, held in answers})
    assert sorted(sum(stages, ())) == list(range(layers))
    assert all(stages), "every rank has a layer"
    saved = {}
    for file in (tmp_path / "model").glob("*.safetensors"):
        saved |= load_file(file)
    assert layers_of(saved) == list(range(layers))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    wanted = tiny_model("LL", num_hidden_layers=layers).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids(4, 16)).logits, wanted(ids(4, 16)).logits)


def refused(plugin, name, overrides, options, kind=ValueError):
    """The error of `boost`, after which the group still works and the model is whole."""
    model = tiny_model(name, **overrides)
    booster = Booster(plugin=make_plugin(plugin, **options))
    keys = list(model.state_dict())
    try:
        booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    except kind as error:
        assert list(model.state_dict()) == keys
        return str(error), all_gather_object(booster.plugin.mesh.world.rank, booster.plugin.mesh.world)


def test_fewer_layers_than_stages_are_refused_on_every_rank():
    for message, ranks in run_on_ranks(4, refused, "pp4", "LL", {"num_hidden_layers": 3}, {}):
        assert "3 blocks" in message and "4 pipeline stages" in message
        assert ranks == [0, 1, 2, 3]
    for message, _ in run_on_ranks(2, refused, "pp2", "LL", {}, {"num_layers_per_stage": [1, 2]}):
        assert "num_layers_per_stage=[1, 2]" in message and "add up to 4" in message


def odd_microbatches(style):
    """By number of micro-batches: loss and gradients of 7 rows, the last micro-batch often shorter."""
    found = {}
    for number in (1, 2, 3, 5, 7):
        run = Boosted("pp2", tiny_model("LL"), num_microbatches=number, pp_style=style)
        found[number] = run.pipeline(whole_batch(rows=7)), run.gradients_by_step()
    return found


@pytest.mark.parametrize("style", STYLES)
def test_every_schedule_takes_any_number_of_micro_batches(style):
    one = Single(tiny_model("LL")).step(whole_batch(rows=7))
    for found in run_on_ranks(2, odd_microbatches, style):
        for loss, gradients in found.values():
            assert loss == pytest.approx(one.losses[0], abs=LOSS)
            assert_close(gradients, one.gradients, GRADIENT)


def batch_with(variant, rows=2, tokens=12):
    """A batch with padding or positions of its own; what is padding is no target."""
    batch = whole_batch(rows, tokens)
    mask = torch.ones_like(batch["input_ids"])
    if variant.startswith("left"):
        mask[0, :5] = 0
    if variant.startswith("right"):
        mask[0, -5:] = 0
    if not variant.startswith("no padding"):
        batch["attention_mask"] = mask
    if "positions" in variant:
        batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0) + 2
    batch["labels"] = batch["labels"].masked_fill(mask == 0, IGNORED)
    return batch


VARIANTS = ["left", "right", "left, positions", "right, positions", "no padding, positions"]


def masked(plugin, style):
    """By model, kind of batch and size of the micro-batches: loss and gradients."""
    found = {}
    for name in ("OP", "LL"):
        for variant in VARIANTS:
            for micro in (1, 2):
                run = Boosted(plugin, tiny_model(name), microbatch_size=micro, pp_style=style)
                found[name, variant, micro] = run.pipeline(batch_with(variant)), run.gradients_by_step()
    return found


@pytest.mark.sample("1f1b-*")
@pytest.mark.parametrize("plugin, world", [("pp2", 2), ("pp4", 4), ("pp2, tp2", 4)])
@pytest.mark.parametrize("style", [style for style, found in STYLES.items() if found.chunks == 1])
def test_masks_and_positions_reach_every_stage(style, plugin, world):
    ones = {
        (name, variant): Single(tiny_model(name)).step(batch_with(variant))
        for name in ("OP", "LL")
        for variant in VARIANTS
    }
    assert ones["OP", "left"].losses[0] == pytest.approx(4.358157, abs=1e-6)
    for found in run_on_ranks(world, masked, plugin, style, timeout_s=110):
        for (name, variant, micro), (loss, gradients) in found.items():
            one = ones[name, variant]
            assert loss == pytest.approx(one.losses[0], abs=LOSS), (name, variant, micro)
            assert_close(gradients, one.gradients, GRADIENT)


def test_more_chunks_than_layers_are_refused():
    for style in CHUNKED:
        for message, _ in run_on_ranks(2, refused, "pp2", "LL", {"num_hidden_layers": 3}, {"pp_style": style}):
            assert "3 blocks" in message and "4 pipeline stages" in message, style
    assert issubclass(ConfigError, ValueError)
