"""`colonnade verify`: right layouts are called the same, and a planted fault is found and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, ViTConfig

from colonnade.cli.main import main
from colonnade.errors import PolicyError
from colonnade.model.twin import VOCAB, shrink, twin_model
from colonnade.shardformer.inference.probe import TOKENS
from colonnade.testing.ranks import run_on_ranks
from colonnade.tools.explain.choice import find_config
from colonnade.tools.verify.batches import make_batches
from colonnade.tools.verify.certificate import certificate_text, make_certificate, write_certificate
from colonnade.tools.verify.check import run_job
from colonnade.tools.verify.job import Job, Layout, prepare

WRONG = Path(__file__).with_name("wrong_policies.py")


def run_folder(folder):
    run_job(Path(folder))


def certificate_of(
    folder, model, tp=2, dp=1, steps=2, policy=None, zero_stage=0, run=run_folder, pipeline=None, **fields
):
    """Run a job on the pool of ranks; the certificate."""
    if fields:
        AutoConfig.for_model(model, **fields).save_pretrained(folder)
        model = str(folder)
    policy = policy and f"{WRONG}:{policy}"
    layout = Layout(tp, dp, policy, zero_stage, **(pipeline or {}))
    job = prepare(find_config(model, tp, layout.pipeline), layout, steps, folder)
    run_on_ranks(layout.ranks, run, str(folder), timeout_s=100)
    return make_certificate(job)


@pytest.mark.parametrize("model", ["llama", "mistral", "qwen2", "qwen3", "gpt2", "opt"])
def test_a_family_with_a_policy_is_the_same(tmp_path, model):
    certificate = certificate_of(tmp_path, model)
    text = certificate_text(certificate)
    assert certificate["verdict"] == "same", text
    assert certificate["places"] is None and certificate["differences_in_fp64"] is None
    assert [d["kind"] for d in certificate["differences"]] == [
        "loss",
        "gradient norm",
        "gradients",
        "weights",
        "replicas",
    ]
    assert all(d["ok"] and not d["note"] for d in certificate["differences"])
    assert certificate["weights_compared"] == certificate["twin"]["parameters"]
    assert certificate["saving"]["ok"] and certificate["saving"]["difference"] < 1e-5
    assert "explain counts" not in text and "the same numbers as one process" in text


@pytest.mark.parametrize(
    ("model", "layout", "fields"),
    [
        ("llama", {"tp": 2, "dp": 2}, {}),
        ("llama", {"tp": 4}, {"num_attention_heads": 32, "num_key_value_heads": 8}),
        ("llama", {"tp": 2}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("opt", {"tp": 2}, {"hidden_size": 1024, "word_embed_proj_dim": 512, "num_attention_heads": 16}),
        ("gpt2", {"tp": 1, "dp": 2}, {}),
        ("llama", {"tp": 2}, {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}),
        ("llama", {"tp": 4}, {"num_attention_heads": 32, "num_key_value_heads": 2, "attention_bias": True}),
        ("qwen3", {"tp": 2}, {"num_attention_heads": 16, "num_key_value_heads": 1, "hidden_size": 1024}),
        ("gpt2", {"tp": 2}, {"n_head": 25, "n_embd": 1600}),
        ("llama", {"tp": 2, "dp": 2, "zero_stage": 1}, {"tie_word_embeddings": True}),
        ("gpt2", {"tp": 1, "dp": 2, "zero_stage": 2}, {}),
    ],
    ids=[
        *("tp 2 × dp 2", "tp 4, grouped", "biases and ties", "narrow embedding", "dp 2"),
        *("9 heads", "2 keys on 4 ranks", "1 key with head norms", "25 heads"),
        *("ZeRO-1", "ZeRO-2"),
    ],
)
def test_layouts_and_variants_are_the_same(tmp_path, model, layout, fields):
    certificate = certificate_of(tmp_path, model, **layout, **fields)
    text = certificate_text(certificate)
    assert certificate["verdict"] == "same", text
    assert "explain counts" not in text


def test_unequal_shares_of_the_model_itself_are_in_the_certificate(tmp_path):
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    certificate = certificate_of(tmp_path, "llama", tp=2, steps=1, **sizes)
    assert "num_attention_heads 9 = 6 + 3" in certificate["uneven"]
    assert certificate["uneven"] in certificate_text(certificate)


@pytest.mark.parametrize("model", ["bloom", "bert", "gemma2", "mixtral"])
def test_data_parallelism_needs_no_policy(tmp_path, model):
    certificate = certificate_of(tmp_path, model, tp=1, dp=2)
    assert certificate["verdict"] == "same", certificate_text(certificate)


def test_where_fp32_cannot_say_fp64_does(tmp_path):
    """T5 does not scale its attention: one process in fp32 is far from its own fp64 run."""
    certificate = certificate_of(tmp_path, "t5", steps=5)
    text = certificate_text(certificate)
    assert certificate["verdict"] == "same" and certificate["places"] is None, text
    assert not all(d["ok"] for d in certificate["differences"]), "else this model is no example any more"
    assert max(certificate["differences_in_fp64"].values()) < 1e-10
    assert "compared in fp64, as one process in fp32 is off from it by" in text


def test_keys_that_are_cut_otherwise_are_suspected_by_name(tmp_path):
    certificate = certificate_of(tmp_path, "llama", policy="KeysCutOtherwise")
    assert certificate["verdict"] == "different"
    places = certificate["places"]
    assert places["forward"]["module"] == "model.layers.0.self_attn.o_proj"
    (suspect,) = places["suspects"]
    assert suspect.startswith("model.layers.*.self_attn.k_proj holds columns 0–15, 32–47 of 64")
    assert suspect.endswith("another part than q_proj, v_proj, o_proj hold")
    text = certificate_text(certificate)
    assert "suspect: model.layers.*.self_attn.k_proj" in text and "NOT the numbers of one process" in text


@pytest.mark.parametrize("dp", [1, 2])
def test_a_bias_that_is_added_too_often_is_named(tmp_path, dp):
    places = certificate_of(tmp_path, "opt", dp=dp, policy="BiasTooOften")["places"]
    assert places["forward"]["module"] == "model.decoder.layers.0.fc2"
    assert places["forward"]["kind"] == "BiasOnEachRank"
    assert not places["suspects"]


@pytest.mark.parametrize("dp", [1, 2])
def test_a_wrong_backward_alone_is_named(tmp_path, dp):
    places = certificate_of(tmp_path, "llama", dp=dp, policy="WrongGradient")["places"]
    assert places["forward"] is None
    # what down_proj hands back reaches the outputs of gate_proj and up_proj first
    assert places["backward"]["module"] in ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate_proj")
    assert places["compared"] > 20


HEADS_2_KEYS = {"num_attention_heads": 32, "num_key_value_heads": 2}


def test_a_wrong_backward_beside_shared_keys_accuses_nobody_else(tmp_path):
    certificate = certificate_of(tmp_path, "llama", tp=4, policy="WrongGradient", **HEADS_2_KEYS)
    places = certificate["places"]
    assert places["forward"] is None and not places["suspects"]
    assert places["backward"]["module"] in ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate_proj")


def test_shared_keys_whose_gradients_are_not_summed_are_named(tmp_path):
    certificate = certificate_of(tmp_path, "llama", tp=4, policy="SharedKeysForgotten", **HEADS_2_KEYS)
    places = certificate["places"]
    assert certificate["verdict"] == "different"
    assert places["forward"] is None and places["backward"] is None and not places["suspects"]
    kinds = {d["kind"]: d for d in certificate["differences"]}
    assert kinds["gradients"]["where"].endswith(("self_attn.k_proj.weight", "self_attn.v_proj.weight"))
    assert not kinds["replicas"]["ok"]


def test_gradients_that_are_not_completed_are_told_apart(tmp_path):
    certificate = certificate_of(tmp_path, "qwen3", policy="HeadNormsForgotten")
    places = certificate["places"]
    assert places["forward"] is None and places["backward"] is None
    kinds = {d["kind"]: d for d in certificate["differences"]}
    assert kinds["gradients"]["where"].endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight"))
    assert not kinds["replicas"]["ok"]
    text = certificate_text(certificate)
    assert "all module outputs and their gradients agree" in text and "needs head_norm" in text


def test_a_certificate_says_what_was_verified(tmp_path):
    certificate = certificate_of(tmp_path, "qwen3", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8)
    path = tmp_path / "certificate.json"
    write_certificate(certificate, path)
    read = json.loads(path.read_text())
    assert read["versions"]["torch"] == torch.__version__
    assert set(read["versions"]) == {"colonnade", "torch", "transformers", "python"}
    assert read["layout"]["tp"] == 2 and read["layout"]["dp"] == 1 and read["steps"] == 2
    assert read["model"]["type"] == "qwen3" and read["model"]["parameters"] > 100 * read["twin"]["parameters"]
    assert read["twin"]["config"]["vocab_size"] == VOCAB
    traffic = {(t["operation"], t["axis"]): t["calls"] for t in read["traffic_per_step"]}
    assert traffic["all_reduce", "tp"] == read["expected_all_reduces"] == 4 * 2 + 2 + 2 * 2
    assert {d["kind"]: d["tolerance"] for d in read["differences"]}["gradients"] == 1e-5
    assert "created" in read and read["format"] == 1


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_certificate_says_what_travels_over_data_parallel_ranks(tmp_path, zero_stage):
    certificate = certificate_of(tmp_path, "llama", tp=1, dp=2, steps=1, zero_stage=zero_stage)
    traffic = {t["operation"]: t["elements"] for t in certificate["traffic_per_step"] if t["axis"] == "dp"}
    held = certificate["parameters_of_rank_0"]
    small = 100  # the loss, the norm, and which parameters were used
    if zero_stage:
        assert "all_reduce" not in traffic
        assert held <= traffic["reduce_scatter"] <= held + small and held <= traffic["all_gather"] <= held + small
    else:
        assert traffic["all_reduce"] == held
    text = certificate_text(certificate)
    assert ("tp 1 × dp 2, ZeRO" in text) == bool(zero_stage)
    assert f"over dp 2.00 elements for each of the {held:,} parameters of rank 0" in text
    assert certificate["layout"]["zero_stage"] == zero_stage


def test_a_wrong_backward_is_named_under_zero_too(tmp_path):
    places = certificate_of(tmp_path, "llama", dp=2, zero_stage=2, policy="WrongGradient")["places"]
    assert places["forward"] is None
    assert places["backward"]["module"] in ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate_proj")


def test_a_job_is_read_as_it_was_written(tmp_path):
    job = prepare(find_config("llama"), Layout(2, 2, f"{WRONG}:RightLlama", 1), 3, tmp_path)
    assert Job.read(tmp_path) == job
    assert job.config().hidden_size == shrink(find_config("llama").config).hidden_size


def test_batches_have_unequal_targets_padding_and_no_special_ids():
    model = twin_model(shrink(LlamaConfig(pad_token_id=3)))
    plain, padded = make_batches(model, dp=3)
    assert plain["input_ids"].shape == (6, TOKENS) and "attention_mask" not in plain
    for batch in (plain, padded):
        assert not {1, 2, 3} & set(batch["input_ids"].flatten().tolist())
        targets = (batch["labels"] != -100).sum(1)
        assert targets[0] < targets[1:].min() and targets.min() > 0
    assert (padded["labels"][padded["attention_mask"] == 0] == -100).all()
    assert padded["attention_mask"].sum() < padded["attention_mask"].numel()


def colonnade(*arguments):
    """The command in a process of its own, with workers of its own."""
    command = [sys.executable, "-m", "colonnade.cli.main", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


@pytest.mark.timeout(400)
def test_the_command_ends_with_0_where_the_numbers_are_the_same(tmp_path):
    GPT2Config().save_pretrained(tmp_path)
    done = colonnade("verify", tmp_path, "--tp", 2, "--steps", 2, "--certificate", tmp_path / "c.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GPT2LMHeadModel: sizes of" in done.stdout and "124,439,808 parameters" in done.stdout
    assert "10 all-reduce over tp" in done.stdout
    assert json.loads((tmp_path / "c.json").read_text())["verdict"] == "same"
    assert done.stderr == ""


@pytest.mark.timeout(400)
def test_the_command_ends_with_1_and_names_the_place_where_they_differ():
    done = colonnade("verify", "opt", "--steps", 2, "--policy", f"{WRONG}:BiasTooOften")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "in forward order:            model.decoder.layers.0.fc2 (BiasOnEachRank)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["llama", "--tp", "64"], "tp_size=64 does not fit"),
        (["llama", "--steps", "0"], "at least 1 step"),
        (["llama", "--dp", "0"], "--dp 0"),
        (["llama", "--zero-stage", "1"], "over one there is nothing to deal out"),
        (["llama", "--dp", "2", "--zero-stage", "3"], "there are 0, 1, 2"),
        (["llama", "--policy", f"{WRONG}:Misspelled"], 'has no "q_prj"'),
        (["nothing-there"], "there is no model 'nothing-there'"),
    ],
)
def test_what_cannot_be_run_ends_with_2_before_anything_starts(capsys, arguments, said):
    assert main(["verify", *arguments]) == 2
    assert said in capsys.readouterr().err


def no_policy(*args, **kwargs):
    raise PolicyError("no policy could be inferred for it.")


def test_a_model_without_a_policy_ends_with_2_and_the_reason(monkeypatch, capsys):
    monkeypatch.setattr("colonnade.shardformer.shard.shardformer.infer_policy", no_policy)
    assert main(["verify", "ctrl"]) == 2
    assert "colonnade verify: no policy could be inferred for it." in capsys.readouterr().err


def test_workers_that_fail_end_with_2(monkeypatch, capsys):
    monkeypatch.setattr("colonnade.cli.verify.start_workers", lambda *args, **kwargs: 1)
    assert main(["verify", "llama"]) == 2
    assert "could not be run to its end" in capsys.readouterr().err


def test_a_model_without_a_loss_ends_with_2(tmp_path, capsys):
    ViTConfig(architectures=["ViTModel"]).save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path)]) == 2
    assert "takes no labels" in capsys.readouterr().err


def test_a_layout_that_the_twin_takes_but_the_model_does_not_ends_with_2(tmp_path, capsys):
    LlamaConfig(intermediate_size=3).save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--tp", "4"]) == 2
    assert "output width  3 for 4 ranks" in capsys.readouterr().err


def test_help_has_examples_and_the_exit_codes(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    out = capsys.readouterr().out
    assert "colonnade verify llama --tp 2" in out and "The exit code is 0" in out


def test_the_class_names_of_the_model_survive_in_the_twin(tmp_path):
    prepare(find_config("llama"), Layout(), 1, tmp_path)
    assert type(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "twin"))).__name__ == (
        "LlamaForCausalLM"
    )
