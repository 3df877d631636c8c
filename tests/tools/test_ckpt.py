"""`colonnade ckpt`: what is in a checkpoint, whether it is whole, how two differ, and a folder of the hub from one."""

import json
import random

import pytest
import torch
import transformers
from torch import nn
from torch.optim import AdamW

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin
from colonnade.cli.main import main
from colonnade.testing.ranks import run_on_ranks
from colonnade.testing.tiny import ids, tiny_model
from colonnade.tools.ckpt.verify import verify

LAYOUTS = {
    "tp 2": (HybridParallelPlugin, {"tp_size": 2}),
    "pp 2": (HybridParallelPlugin, {"pp_size": 2}),
    "zero 2": (LowLevelZeroPlugin, {"stage": 2}),
}
BERT = {
    "vocab_size": 67, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2,
    "max_position_embeddings": 32,
}  # fmt: skip


def build(name):
    if name == "bert":
        torch.manual_seed(0)
        return transformers.BertForMaskedLM(transformers.BertConfig(**BERT))
    return tiny_model(name, vocab_size=67)


def save(layout, name, folder, steps=(3,), precision="fp32"):
    plugin_class, options = LAYOUTS[layout]
    booster, model = Booster(plugin=plugin_class(precision=precision, **options)), build(name)
    model, optimizer, *_ = booster.boost(model, AdamW(model.parameters(), lr=1e-2))
    x = ids(4, 8, vocab=67)
    for step in range(1, max(steps) + 1):
        booster.execute_pipeline(iter([{"input_ids": x, "labels": x}]), model, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if step in steps:
            booster.save(folder, model, optimizer, step=step, extra={"note": step})
    booster.save_model(model, f"{folder}-hub")


def call(capsys, *words):
    code = main(["ckpt", *map(str, words)])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_inspect_says_what_there_is(tmp_path, capsys):
    run_on_ranks(2, save, "tp 2", "LT", str(tmp_path / "run"), (2, 3))
    code, out, _ = call(capsys, "inspect", tmp_path / "run", "--tensors", "*layers.0.mlp.up_proj*")
    assert code == 0
    for words in ("← latest", "ParallelMesh(dp 1 × pp 1 × sp 1 × tp 2)", "LlamaForCausalLM", "AdamW", "in 38 tensors",
                  "model.embed_tokens.weight = lm_head.weight", "rank-00001-of-00002.safetensors", "extra"):  # fmt: skip
        assert words in out, out
    lines = [line for line in out.splitlines() if "up_proj" in line]
    assert len(lines) == 1 + 3 and "[64, 32]" in lines[1] and "2 chunks" in lines[1]
    (tmp_path / "run" / ".step-00000009.saving-gone-1-aaaaaaaa").mkdir()
    assert "left by a save that died" in call(capsys, "inspect", tmp_path / "run")[1]
    assert call(capsys, "inspect", tmp_path / "run" / "step-00000002")[1].count("latest") == 0
    code, _, err = call(capsys, "inspect", tmp_path / "run-hub")
    assert code == 2 and "booster.load_model" in err


def test_verify_finds_any_changed_byte(tmp_path, capsys):
    run_on_ranks(2, save, "zero 2", "LT", str(tmp_path / "run"), (2, 3))
    code, out, _ = call(capsys, "verify", tmp_path / "run", "--all")
    assert (code, out) == (0, "every byte is what was written\n")
    chance, step = random.Random(0), tmp_path / "run" / "step-00000003"
    files = [file for file in step.rglob("*") if file.is_file()] + [tmp_path / "run" / "latest"]
    assert len(files) == 2 + 1 + 1 + 2 + 1
    for file in files:
        good = file.read_bytes()
        places = range(len(good)) if len(good) < 60 else chance.sample(range(len(good)), 60)
        for place in places:
            changed = bytearray(good)
            changed[place] ^= 1 << chance.randrange(8)
            file.write_bytes(changed)
            found = verify(tmp_path / "run")
            assert found and file.name in found[0], (file, place)
        file.write_bytes(good[:-1])
        assert verify(tmp_path / "run") or file.name == "latest"
        file.write_bytes(good)
    assert verify(tmp_path / "run") == []
    (step / "state.pt").unlink()
    code, out, _ = call(capsys, "verify", tmp_path / "run")
    assert code == 1 and "state.pt" in out and "1 problem" in out


def test_diff_compares_any_layouts_and_folders_of_the_hub(tmp_path, capsys):
    for layout in ("tp 2", "zero 2"):
        run_on_ranks(2, save, layout, "LT", str(tmp_path / layout), (2, 3))
    a, b = tmp_path / "tp 2", tmp_path / "zero 2"
    code, out, _ = call(capsys, "diff", a, a)
    assert code == 0 and out.startswith("the same: 114 tensors")
    code, out, _ = call(capsys, "diff", a, b, "--tolerance", "1e-4")
    assert code == 0 and "within the tolerance" in out, out
    code, out, _ = call(capsys, "diff", a, a / "step-00000002")
    assert code == 1 and out.startswith("different: 114 of 114 tensors") and "step: 3 and 2" in out and "extra" in out
    code, out, _ = call(capsys, "diff", a, tmp_path / "tp 2-hub")
    assert code == 0 and out.startswith("the same: 38 tensors"), out
    other = tiny_model("LT", vocab_size=67, num_hidden_layers=3)
    other.save_pretrained(tmp_path / "other")
    code, out, _ = call(capsys, "diff", tmp_path / "other", a)
    assert code == 1 and f"only in {a}: model.layers.3" in out


@pytest.mark.parametrize(
    "name, layout", [("LT", "tp 2"), ("G2", "zero 2"), ("MX", "zero 2"), ("bert", "pp 2"), ("MX", "tp 2")]
)
def test_an_export_is_what_the_boosted_model_saves(tmp_path, capsys, name, layout):
    run_on_ranks(2, save, layout, name, str(tmp_path / "run"))
    code, out, err = call(capsys, "export", tmp_path / "run", tmp_path / "out", "--max-shard-size", "40KB")
    assert code == 0, err
    kind = type(build(name))
    exported, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    saved = kind.from_pretrained(tmp_path / "run-hub")
    state = saved.state_dict()
    assert [n for n, t in exported.state_dict().items() if not torch.equal(t, state[n])] == []
    assert exported.config.to_dict() == saved.config.to_dict() | {"_name_or_path": exported.config._name_or_path}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1 and "parameters" in out


def test_formats_and_tokenizers_of_an_export(tmp_path, capsys):
    run_on_ranks(2, save, "zero 2", "LT", str(tmp_path / "run"), (3,), "bf16")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "tokenizer.json").write_text("{}")
    code, *_ = call(capsys, "export", tmp_path / "run", tmp_path / "out", "--tokenizer", tmp_path / "tokens")
    assert code == 0 and (tmp_path / "out" / "tokenizer.json").is_file()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert call(capsys, "export", tmp_path / "run", tmp_path / "out", "--dtype", "fp32")[0] == 0
    exact = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert exact.dtype == torch.float32
    for a, b in zip(exact.parameters(), model.parameters()):
        assert torch.equal(a.bfloat16(), b)
    assert not torch.equal(exact.lm_head.weight, model.lm_head.weight.float())  # the master weights


def plain_modules(folder):
    booster, model = Booster(plugin=LowLevelZeroPlugin(precision="fp32")), nn.Linear(3, 3)
    model, *_ = booster.boost(model)
    booster.save(folder, model)


def test_what_cannot_be_exported_is_said(tmp_path, capsys):
    run_on_ranks(1, plain_modules, str(tmp_path / "run"))
    code, _, err = call(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert code == 2 and "not of a transformers model" in err and not (tmp_path / "out").exists()
    code, _, err = call(capsys, "export", tmp_path / "nothing", tmp_path / "out")
    assert code == 2 and "does not exist" in err


def test_reshard_says_that_it_is_not_needed_and_does_it_anyway(tmp_path, capsys):
    run_on_ranks(2, save, "tp 2", "LT", str(tmp_path / "run"))
    code, out, _ = call(capsys, "reshard", tmp_path / "run", tmp_path / "other", "--ranks", "3")
    assert code == 0 and "Not needed" in out and not (tmp_path / "other").exists()
    assert call(capsys, "reshard", tmp_path / "run", tmp_path / "other", "--ranks", "3", "--anyway")[0] == 0
    assert len(list((tmp_path / "other").glob("rank-*"))) == 3
    assert verify(tmp_path / "other") == []
    assert call(capsys, "diff", tmp_path / "run", tmp_path / "other")[0] == 0
    assert call(capsys, "reshard", tmp_path / "run", tmp_path / "x", "--ranks", "0", "--anyway")[0] == 2


def test_help_has_an_example_each(capsys):
    for action in ("inspect", "verify", "diff", "export", "reshard"):
        with pytest.raises(SystemExit):
            main(["ckpt", action, "--help"])
        assert f"colonnade ckpt {action}" in capsys.readouterr().out
