"""CKPT-1: what is saved is a complete Hugging Face checkpoint. RES-3: loaded weights are not undone by master weights."""

import json
import math

import pytest
import torch
from field_cases import WITH_STAGES, Boosted, adamw, whole_batch
from safetensors import safe_open
from torch.optim import SGD, AdamW
from transformers import AutoModelForCausalLM

from colonnade.precision.loss_scale import LossScale
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model

FORMS = {"files of 20 KB": {"shard": True, "size_per_shard": "20KB"}, "one file": {"shard": False}}


def save(plugin, model, folder):
    run = Boosted(plugin, tiny_model(model), adamw)
    for form, options in FORMS.items():
        run.booster.save_model(run.model, folder / form, **options)


def read(folder):
    """All tensors of a folder, and in which file each is."""
    tensors, files = {}, {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            for key in opened.keys():  # noqa: SIM118 - not a dict
                assert key not in tensors
                tensors[key], files[key] = opened.get_tensor(key), file.name
    return tensors, files


def config_of(folder):
    config = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in config.items() if key != "transformers_version"}


@pytest.mark.sample("*-LT-38-156800")
@pytest.mark.parametrize("model, keys, total_size", [("LL", 39, 164992), ("LT", 38, 156800)])
@pytest.mark.parametrize(
    "plugin, world",
    [("tp2", 2), ("tp2", 4), ("ddp", 2), ("zero 1", 2), ("zero 2", 3), ("tp2, zero 1", 4), ("fsdp", 2), ("fsdp", 3)]
    + WITH_STAGES,
)
def test_saved_folder_is_a_complete_checkpoint(plugin, world, model, keys, total_size, tmp_path):
    run_on_ranks(world, save, plugin, model, tmp_path)
    original = tiny_model(model).eval()
    original.save_pretrained(tmp_path / "own")
    wanted, _ = read(tmp_path / "own")
    assert len(wanted) == keys
    for form in FORMS:
        folder = tmp_path / form
        tensors, files = read(folder)
        assert tensors.keys() == wanted.keys()
        assert all(torch.equal(tensors[key], value) for key, value in wanted.items())
        assert tensors["model.embed_tokens.weight"].shape == (64, 32)
        if form == "one file":
            assert set(files.values()) == {"model.safetensors"}
        else:
            assert len(set(files.values())) > 5
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            assert index["weight_map"] == files
            assert index["metadata"]["total_size"] == total_size
        assert config_of(folder) == config_of(tmp_path / "own")
        loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert {kind: found for kind, found in info.items() if found} == {}
        with torch.no_grad():
            assert (loaded(ids(4, 16)).logits - original(ids(4, 16)).logits).abs().max() <= 1e-6


def still_sgd(model):
    return SGD(model.parameters(), lr=0.0)


def still_adamw(model):
    return AdamW(model.parameters(), lr=0.0, weight_decay=0.0)


def load_step_save(plugin, precision, source, folder):
    """Load at once, and into a model that has trained already; then a step that changes nothing, and save."""
    for optimizer_fn in (still_sgd, still_adamw):
        for trained in (False, True):
            scale = LossScale(initial=256)
            run = Boosted(plugin, tiny_model("LL"), optimizer_fn, precision=precision, loss_scale=scale)
            if trained:
                for group in run.optimizer.param_groups:
                    group["lr"] = 0.1
                run.step(whole_batch())
                for group in run.optimizer.param_groups:
                    group["lr"] = 0.0
            run.booster.load_model(run.model, source)
            run.step(whole_batch())
            assert math.isfinite(run.optimizer.grad_norm), "no step has been left out"
            run.booster.save_model(run.model, folder / f"{optimizer_fn.__name__} {trained}")


@pytest.mark.sample("*bf16*")
@pytest.mark.parametrize("precision, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize(
    "plugin, world",
    [
        ("tp2", 2),
        ("dp", 2),
        ("ddp", 2),
        ("zero 1", 2),
        ("zero 2", 2),
        ("tp2, zero 1", 4),
        ("tp2, zero 2", 4),
        ("fsdp", 2),
        ("pp2", 2),
        ("pp2, zero 1", 4),
        ("pp2, tp2", 4),
    ],
)
def test_loaded_weights_survive_the_next_step_in_16_bits(plugin, world, precision, dtype, tmp_path):
    other = tiny_model("LL", noise_seed=2)
    other.save_pretrained(tmp_path / "B")
    run_on_ranks(world, load_step_save, plugin, precision, tmp_path / "B", tmp_path)
    saved = torch.float32 if plugin == "fsdp" else dtype  # FSDP keeps its parameters in float32
    for optimizer_fn in (still_sgd, still_adamw):
        for trained in (False, True):
            tensors, _ = read(tmp_path / f"{optimizer_fn.__name__} {trained}")
            assert len(tensors) == 39
            for name, value in other.named_parameters():
                assert tensors[name].dtype == saved
                assert torch.equal(tensors[name], value.to(saved)), name
