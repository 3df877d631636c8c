"""load_model: each rank fills the shards it has from an ordinary folder, in place."""

import json
import shutil

import pytest
import torch
from hub_models import assert_holds_its_boxes, build, shard
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from colonnade.checkpoint import load_model, save_model
from colonnade.cluster.mesh import ParallelMesh
from colonnade.errors import CheckpointError
from colonnade.testing.ranks import run_on_ranks


def wipe(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


def load_shards(family, changes, axes, folder, pad_rows=0, dtype=torch.float32):
    mesh = ParallelMesh(**axes)
    model = wipe(shard(build(family, **changes).to(dtype), mesh, pad_rows))
    before = {name: (parameter, parameter.data_ptr()) for name, parameter in model.named_parameters()}
    report = load_model(model, folder, mesh)
    assert_holds_its_boxes(model, build(family, **changes))
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and parameter.data_ptr() == before[name][1] and parameter.dtype == dtype
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (family in ("tied", "gpt2"))
    if pad_rows:
        assert model.get_input_embeddings().weight[-pad_rows:].isnan().all()
    return report.loaded, report.bytes_read


@pytest.mark.parametrize(
    ("family", "changes", "axes", "world"),
    [
        ("llama", {}, {"tp": 2}, 2),
        ("tied", {"vocab_size": 67}, {"tp": 2}, 2),
        ("tied", {}, {"tp": 2}, 4),
        ("llama", {"vocab_size": 67, "num_key_value_heads": 4}, {"tp": 4}, 4),
        ("gpt2", {}, {"tp": 2}, 2),
        ("mixtral", {}, {"tp": 2}, 2),
    ],
)
@pytest.mark.parametrize("max_shard_size", ["20KB", "1GB"])
def test_shards_are_filled_in_place_from_save_pretrained(family, changes, axes, world, max_shard_size, tmp_path):
    build(family, **changes).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    run_on_ranks(world, load_shards, family, changes, axes, tmp_path)


def test_two_ranks_together_read_each_byte_once_and_the_norms_twice(tmp_path):
    build("llama").save_pretrained(tmp_path)
    reports = run_on_ranks(2, load_shards, "llama", {}, {"tp": 2}, tmp_path)
    norms = 9 * 32 * 4
    assert reports == [(39, (164_992 - norms) // 2 + norms)] * 2


def test_values_are_cast_and_padding_is_left_alone(tmp_path):
    build("tied", vocab_size=67).save_pretrained(tmp_path)
    run_on_ranks(2, load_shards, "tied", {"vocab_size": 67}, {"tp": 2}, tmp_path, pad_rows=3, dtype=torch.bfloat16)


def save_on_two_load_on_four(path):
    two, four = ParallelMesh(tp=2), ParallelMesh(tp=4)
    save_model(shard(build("llama", vocab_size=67), two), path, two, size_per_shard="20KB")
    model = wipe(shard(build("llama", vocab_size=67), four))
    load_model(model, path, four)
    assert_holds_its_boxes(model, build("llama", vocab_size=67))


def test_saved_with_tp_2_and_loaded_with_tp_4(tmp_path):
    run_on_ranks(4, save_on_two_load_on_four, tmp_path / "model")


def save_mixtral_and_load(path):
    mesh = ParallelMesh(tp=2)
    save_model(shard(build("mixtral"), mesh), path, mesh, size_per_shard="20KB")
    model = wipe(shard(build("mixtral"), mesh))
    load_model(model, path, mesh)
    assert_holds_its_boxes(model, build("mixtral"))


def test_stacked_experts_come_back_from_one_matrix_per_expert(tmp_path):
    run_on_ranks(2, save_mixtral_and_load, tmp_path / "model")


@pytest.mark.parametrize("family", ["gpt2", "tied"])
def test_base_model_and_model_with_head_load_each_other(family, tmp_path):
    model = build(family)
    base = getattr(model, model.base_model_prefix)
    base.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "full")
    loaded = wipe(build(family))
    load_model(loaded, tmp_path / "base", ParallelMesh())
    assert_holds_its_boxes(loaded, model)
    loaded = wipe(AutoModel.from_config(model.config))
    load_model(loaded, tmp_path / "full", ParallelMesh())
    assert_holds_its_boxes(loaded, base)


def test_both_names_of_a_tied_weight_in_the_file_are_fine(tmp_path):
    model = build("tied")
    tensors = {**model.state_dict(), "lm_head.weight": model.lm_head.weight.detach().clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = wipe(build("tied"))
    load_model(loaded, tmp_path, ParallelMesh())
    assert_holds_its_boxes(loaded, model)


def test_buffers_that_old_files_hold_and_todays_models_compute_are_ignored(tmp_path):
    model = build("llama")
    old = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq": torch.ones(4) for index in range(4)}
    save_file({**model.state_dict(), **old}, tmp_path / "model.safetensors")
    loaded = wipe(build("llama"))
    assert load_model(loaded, tmp_path, ParallelMesh()).unexpected == ()
    assert_holds_its_boxes(loaded, model)


def load_and_report(family, folder, strict):
    """The message, and that no weight has changed."""
    mesh = ParallelMesh(tp=2)
    model = shard(build(family), mesh)
    with pytest.raises(CheckpointError) as caught:
        load_model(model, folder, mesh, strict=strict)
    assert_holds_its_boxes(model, build(family))
    return str(caught.value)


def test_everything_that_does_not_fit_is_listed_at_once_on_every_rank(tmp_path):
    tensors = build("llama").state_dict()
    tensors["model.layers.0.mlp.gate_projj.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")
    tensors["model.norm.weight"] = torch.ones(16)
    save_file(tensors, tmp_path / "model.safetensors")
    first, second = run_on_ranks(2, load_and_report, "llama", tmp_path, True)
    assert first == second
    assert "model.layers.0.mlp.gate_proj.weight   (near: model.layers.0.mlp.gate_projj.weight)" in first
    assert "unexpected (1)  model.layers.0.mlp.gate_projj.weight" in first
    assert "model.norm.weight: (16,) in the folder, (32,) in the model" in first
    # Shapes must agree even where names need not.
    loose = run_on_ranks(2, load_and_report, "llama", tmp_path, False)[0]
    assert "model.norm.weight: (16,)" in loose and "missing" not in loose


def load_loosely(folder):
    mesh = ParallelMesh(tp=2)
    model = shard(build("llama"), mesh)
    report = load_model(model, folder, mesh, strict=False)
    assert_holds_its_boxes(model, build("llama"))
    return report.missing, report.unexpected


def test_strict_false_reports_what_it_left_out(tmp_path):
    tensors = build("llama").state_dict()
    tensors["other"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    assert run_on_ranks(2, load_loosely, tmp_path) == [(("model.norm.weight",), ("other",))] * 2


def damage_by_truncation(folder):
    file = folder / "model-00002-of-00011.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return file.name


def damage_by_absence(folder):
    (folder / "model-00003-of-00011.safetensors").unlink()
    return "model-00003-of-00011.safetensors is missing"


def damage_the_header(folder):
    file = folder / "model-00001-of-00011.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    return file.name


def damage_the_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"metadata": ')
    return "model.safetensors.index.json is not a valid index"


def damage_by_exchange(folder):
    shutil.copy(folder / "model-00004-of-00011.safetensors", folder / "model-00005-of-00011.safetensors")
    return "model-00005-of-00011.safetensors lacks"


def damage_everything(folder):
    for file in folder.glob("model*"):
        file.unlink()
    return "holds no checkpoint of this kind"


@pytest.mark.parametrize(
    "damage",
    [
        damage_by_truncation,
        damage_by_absence,
        damage_the_header,
        damage_the_index,
        damage_by_exchange,
        damage_everything,
    ],
)
def test_damaged_files_are_named_on_every_rank_and_nothing_is_loaded(damage, tmp_path):
    build("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    named = damage(tmp_path)
    messages = run_on_ranks(2, load_and_report, "llama", tmp_path, True, timeout_s=30)
    assert all(named in message and "no weight has been changed" in message for message in messages)


def load_different_folders(first, second):
    mesh = ParallelMesh(tp=2)
    model = shard(build("llama"), mesh)
    with pytest.raises(CheckpointError, match="the ranks see different files"):
        load_model(model, [first, second][mesh.world.rank], mesh)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        load_model(model, [first, first.with_name("nowhere")][mesh.world.rank], mesh)
    assert_holds_its_boxes(model, build("llama"))


def test_ranks_that_see_different_files_do_not_mix_them(tmp_path):
    build("llama").save_pretrained(tmp_path / "a", max_shard_size="20KB")
    build("llama").save_pretrained(tmp_path / "b", max_shard_size="30KB")
    run_on_ranks(2, load_different_folders, tmp_path / "a", tmp_path / "b")


def test_a_model_on_the_meta_device_is_refused(tmp_path):
    build("llama").save_pretrained(tmp_path)
    with torch.device("meta"):
        model = type(build("llama"))(build("llama").config)
    with pytest.raises(CheckpointError, match="meta device"):
        load_model(model, tmp_path, ParallelMesh())


def test_an_expert_that_is_missing_from_the_files_is_an_error(tmp_path):
    build("mixtral").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = build("mixtral")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj cannot be made"):
        load_model(model, tmp_path, ParallelMesh())
    assert_holds_its_boxes(model, build("mixtral"))


def test_index_keys_and_json_are_what_the_loader_trusts(tmp_path):
    build("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"missing \(1\) +model\.norm\.weight"):
        load_model(build("llama"), tmp_path, ParallelMesh())
