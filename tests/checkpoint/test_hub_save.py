"""save_model: shards of many ranks become the folder that one process would have written."""

import copy
import json
import weakref
from pathlib import Path

import pytest
import torch
from hub_models import build, shard
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from colonnade.checkpoint import hub_save, load_model, save_model
from colonnade.cluster.mesh import ParallelMesh
from colonnade.comm.ledger import ledger
from colonnade.model.layout import Range, TensorLayout, set_layout
from colonnade.testing.ranks import run_on_ranks


def read(folder):
    """All tensors of a folder, and in which file each of them is; no key may be in two files."""
    tensors, files = {}, {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for key in opened.keys():  # noqa: SIM118 - not a dict
                assert key not in tensors
                tensors[key], files[key] = opened.get_tensor(key), file.name
    return tensors, files


def assert_same_as_save_pretrained(folder, reference, tmp_path):
    """The folder has the keys, values, dtypes, index totals and config of transformers' own save."""
    reference.save_pretrained(tmp_path / "own")
    (saved, files), (expected, _) = read(folder), read(tmp_path / "own")
    assert saved.keys() == expected.keys()
    for key, value in expected.items():
        assert saved[key].dtype == value.dtype and torch.equal(saved[key], value), key
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text()) == json.loads((tmp_path / "own" / name).read_text())
    if len(set(files.values())) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == files
        assert index["metadata"] == {
            "total_size": sum(value.nbytes for value in expected.values()),
            "total_parameters": reference.num_parameters(),
        }
    else:
        assert set(files.values()) == {"model.safetensors"}
        assert not (folder / "model.safetensors.index.json").exists()


def save_shards(family, changes, axes, path, pad_rows=0, dtype=torch.float32, **options):
    mesh = ParallelMesh(**axes)
    save_model(shard(build(family, **changes).to(dtype), mesh, pad_rows), path, mesh, **options)


@pytest.mark.parametrize(
    ("family", "changes", "axes", "world"),
    [
        ("llama", {}, {"tp": 2}, 2),
        ("tied", {}, {"tp": 2}, 2),
        ("tied", {"vocab_size": 67}, {"tp": 2}, 2),
        ("llama", {"vocab_size": 67}, {"tp": 2}, 4),
        ("tied", {}, {"tp": 2}, 4),
        ("gpt2", {}, {"tp": 2}, 2),
        ("mixtral", {}, {"tp": 2}, 2),
        ("llama", {}, {"tp": 2, "sp": 2}, 4),
    ],
)
@pytest.mark.parametrize("options", [{"size_per_shard": "20KB"}, {"shard": False}])
def test_folder_equals_save_pretrained(family, changes, axes, world, options, tmp_path):
    run_on_ranks(world, save_shards, family, changes, axes, tmp_path / "model", **options)
    assert_same_as_save_pretrained(tmp_path / "model", build(family, **changes), tmp_path)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


@pytest.mark.parametrize(("family", "total_size", "keys"), [("llama", 164992, 39), ("tied", 156800, 38)])
def test_from_pretrained_loads_the_files_of_a_cut_model(family, total_size, keys, tmp_path):
    run_on_ranks(2, save_shards, family, {}, {"tp": 2}, tmp_path / "model", size_per_shard="20KB")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total_size and len(index["weight_map"]) == keys
    assert ("lm_head.weight" in index["weight_map"]) == (family == "llama")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(7))
    assert torch.equal(model(ids).logits, build(family)(ids).logits)
    assert all(file.stat().st_size <= 20_000 + 4096 for file in (tmp_path / "model").glob("*.safetensors"))


def test_rows_that_pad_a_vocabulary_are_not_saved(tmp_path):
    run_on_ranks(2, save_shards, "tied", {"vocab_size": 67}, {"tp": 2}, tmp_path / "model", pad_rows=5)
    assert_same_as_save_pretrained(tmp_path / "model", build("tied", vocab_size=67), tmp_path)


def test_bfloat16_stays_bfloat16(tmp_path):
    run_on_ranks(2, save_shards, "llama", {}, {"tp": 2}, tmp_path / "model", dtype=torch.bfloat16)
    assert_same_as_save_pretrained(tmp_path / "model", build("llama").to(torch.bfloat16), tmp_path)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"


def save_replicated_heads(path):
    mesh = ParallelMesh(tp=2)
    model = shard(build("llama", num_key_value_heads=1), mesh)
    whole = build("llama", num_key_value_heads=1)
    for name, parameter in model.named_parameters():
        if "k_proj" in name or "v_proj" in name:
            parameter.data = whole.get_parameter(name).data
            set_layout(parameter, TensorLayout.split(parameter.shape, 0, [Range(0, 8, (0, 1))], "tp").named(name))
    save_model(model, path, mesh)


def test_key_value_heads_that_both_ranks_hold_are_saved_once(tmp_path):
    run_on_ranks(2, save_replicated_heads, tmp_path / "model")
    assert_same_as_save_pretrained(tmp_path / "model", build("llama", num_key_value_heads=1), tmp_path)


def save_stages(family, path):
    mesh = ParallelMesh(pp=2)
    model = build(family)
    first, layers = mesh.rank("pp") == 0, model.model.layers
    for index in range(4):
        if (index < 2) != first:
            layers[index] = nn.Identity()
    if first:
        model.model.norm = nn.Identity()
        if family == "llama":
            model.lm_head = nn.Identity()
    elif family == "llama":
        model.model.embed_tokens = nn.Identity()
    save_model(model, path, mesh, size_per_shard="20KB")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    report = load_model(model, path, mesh)
    whole = build(family).state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    return report.loaded


@pytest.mark.parametrize(("family", "loaded"), [("llama", [19, 20]), ("tied", [19, 20])])
def test_stages_of_a_pipeline_make_one_folder(family, loaded, tmp_path):
    assert run_on_ranks(2, save_stages, family, tmp_path / "model") == loaded
    assert_same_as_save_pretrained(tmp_path / "model", build(family), tmp_path)


class Plain(nn.Module):
    """A model that transformers knows nothing of: tied weights, buffers of several dtypes, one not persistent."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("levels", torch.arange(3, dtype=torch.bfloat16))
        self.register_buffer("table", torch.ones(5), persistent=False)


def save_and_load_plain(path):
    torch.manual_seed(3)
    mesh, model = ParallelMesh(tp=2), Plain()
    reference = copy.deepcopy(model).state_dict()
    for name in ("levels", "mask"):
        buffer = model.get_buffer(name)
        layout = TensorLayout.split(buffer.shape, 0, [[Range(0, 2), Range(2, 3)][mesh.rank("tp")]], "tp")
        setattr(model, name, layout.extract(buffer))
        set_layout(model.get_buffer(name), layout)
    save_model(model, path, mesh)
    for tensor in [model.embed.weight.data, model.scale.data, model.steps, model.mask, model.levels]:
        tensor.zero_()
    report = load_model(model, path, mesh)
    assert report.loaded == 5 and model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, reference["embed.weight"]) and model.scale == 1.5 and model.steps == 3
    assert model.levels.tolist() == [[0.0, 1.0], [2.0]][mesh.rank("tp")]
    assert model.mask.tolist() == [[True, False], [True]][mesh.rank("tp")]
    return reference


def test_plain_module_with_ties_and_buffers(tmp_path):
    reference, _ = run_on_ranks(2, save_and_load_plain, tmp_path / "model")
    saved, _ = read(tmp_path / "model")
    assert saved.keys() == {"embed.weight", "scale", "steps", "mask", "levels"}
    assert all(saved[key].dtype == reference[key].dtype and torch.equal(saved[key], reference[key]) for key in saved)
    assert not (tmp_path / "model" / "config.json").exists()


def test_pristine_config_and_tokenizer_are_written_and_not_changed(tmp_path):
    from tokenizers import Tokenizer, models

    model = build("llama")
    pristine = copy.deepcopy(model.config)
    model.config.num_attention_heads = 2  # what a parallel layer may have done
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]")))
    before = pristine.to_dict()
    save_model(model, tmp_path / "model", ParallelMesh(), config=pristine, tokenizer=tokenizer)
    assert pristine.to_dict() == before
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["num_attention_heads"] == 4 and config["architectures"] == ["LlamaForCausalLM"]
    assert (tmp_path / "model" / "tokenizer.json").exists()


def save_and_watch(path):
    """Most bytes of gathered tensors alive at once on this rank, and bytes it has sent or received."""
    alive, peak = [], 0
    original = hub_save.ModelSave._gather

    def gather(self, wanted):
        nonlocal peak
        whole = original(self, wanted)
        if whole is not None:
            alive.append((weakref.ref(whole.untyped_storage()), whole.nbytes))
            peak = max(peak, sum(nbytes for storage, nbytes in alive if storage() is not None))
        return whole

    hub_save.ModelSave._gather = gather
    try:
        mesh = ParallelMesh(tp=2)
        with ledger() as book:
            save_model(shard(build("llama"), mesh), path, mesh, size_per_shard="20KB")
    finally:
        hub_save.ModelSave._gather = original
    return peak, len(alive), dict(book.elements)


def test_writer_holds_one_file_and_one_tensor_and_other_ranks_nothing(tmp_path):
    (peak, gathered, traffic), *others = run_on_ranks(4, save_and_watch, tmp_path / "model")
    assert gathered == 39
    assert 0 < peak <= 20_000 + 64 * 32 * 4
    assert [(peak, gathered) for peak, gathered, _ in others] == [(0, 0)] * 3
    cut = 41_248 - 9 * 32  # all but the norms
    assert traffic["receive", "world"] == others[0][2]["send", "world"] == cut // 2
    # The second data-parallel copy, ranks 2 and 3, sends nothing.
    assert all(operation == "all_gather_object" for *_, sent in others[1:] for operation, _ in sent)


def test_undeclared_ties_of_a_transformers_model_keep_both_names(tmp_path):
    model = build("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    save_model(model, tmp_path / "model", ParallelMesh())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded.model.layers[1].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
