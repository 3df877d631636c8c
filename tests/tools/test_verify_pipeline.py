"""`colonnade verify --pp`: right pipelines are called the same, and a planted fault is found and named."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from colonnade.cli.main import main
from colonnade.model.twin import shrink
from colonnade.tools.explain.choice import find_config
from colonnade.tools.verify.certificate import certificate_text
from colonnade.tools.verify.job import Job, Layout, prepare
from tests.tools.test_verify import WRONG, certificate_of, colonnade, run_folder

PIPELINES = {
    "llama": ("llama", {}),
    "gpt2, tied": ("gpt2", {}),
    "gemma2, inferred": ("gemma2", {}),
    "albert, one block again and again": ("albert", {}),
    "t5, encoder and decoder": ("t5", {}),
    "mixtral, experts": ("mixtral", {}),
    "dbrx, looked at with weights": ("dbrx", {}),
    "gemma3n, shared keys": ("gemma3n_text", {}),
    "gpipe": ("qwen3", {"pipeline": {"pp": 2, "pp_style": "gpipe"}}),
    "interleaved": ("llama", {"pipeline": {"pp": 2, "pp_style": "interleaved"}}),
    "zbh1": ("gpt2", {"pipeline": {"pp": 2, "pp_style": "zbh1"}}),
    "zbv": ("gpt2", {"pipeline": {"pp": 2, "pp_style": "zbv"}}),
    "pp 4": ("llama", {"pipeline": {"pp": 4}}),
    "tp 2": ("gpt2", {"tp": 2}),
    "dp 2, ZeRO-1": ("gpt2", {"dp": 2, "zero_stage": 1}),
    "tp 2, inferred": ("gemma2", {"tp": 2}),
}


def pipeline_of(folder, model, pipeline=None, tp=1, **layout):
    return certificate_of(folder, model, tp=tp, pipeline=pipeline or {"pp": 2}, **layout)


@pytest.mark.timeout(240)
@pytest.mark.sample("llama", "gpt2, tied", "t5*")
@pytest.mark.parametrize("case", PIPELINES)
def test_pipelines_are_the_same(tmp_path, case):
    model, layout = PIPELINES[case]
    certificate = pipeline_of(tmp_path, model, **layout)
    text = certificate_text(certificate)
    assert certificate["verdict"] == "same" and certificate["places"] is None, text
    assert all(not d["note"] for d in certificate["differences"])
    assert certificate["weights_compared"] > 0.9 * certificate["twin"]["parameters"]  # rounding decides some of T5's
    assert certificate["saving"]["ok"] and certificate["saving"]["difference"] < 1e-5
    assert f" × pp {certificate['layout']['pp']} × dp " in text and "explain counts" not in text
    traffic = {(t["operation"], t["axis"]) for t in certificate["traffic_per_step"]}
    assert {("send", "pp"), ("receive", "pp")} <= traffic


@pytest.mark.long
def test_where_fp32_cannot_say_fp64_does_of_a_pipeline_too(tmp_path):
    certificate = pipeline_of(tmp_path, "cpmant", steps=5)
    assert certificate["verdict"] == "same", certificate_text(certificate)
    assert not all(d["ok"] for d in certificate["differences"]), "else this model is no example any more"
    assert max(certificate["differences_in_fp64"].values()) < 1e-10


def run_with_a_wrong_border(folder):
    """As run_folder; what a stage receives is another than what was sent."""

    def shifted(tensor):
        return torch.add(tensor, 0.01).detach().requires_grad_()

    with patch("colonnade.pipeline.runtime.as_input", shifted):
        run_folder(folder)


def test_a_fault_at_a_border_is_placed_behind_it(tmp_path):
    certificate = pipeline_of(tmp_path, "llama", run=run_with_a_wrong_border)
    assert certificate["verdict"] == "different"
    place = certificate["places"]["forward"]
    assert place["module"] == "model.layers.1.input_layernorm" and place["rank"] == 1
    text = certificate_text(certificate)
    assert "where the runs part, in one micro-batch:" in text and "NOT the numbers of one process" in text


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("model", "policy", "where", "name"),
    [
        ("llama", "KeysCutOtherwise", "forward", "model.layers.0.self_attn.o_proj"),
        ("llama", "WrongGradient", "backward", "model.layers.1.mlp.up_proj"),
        ("opt", "BiasTooOften", "forward", "model.decoder.layers.0.fc2"),
    ],
)
def test_a_fault_of_a_policy_is_named_on_its_stage(tmp_path, model, policy, where, name):
    places = pipeline_of(tmp_path, model, tp=2, policy=policy)["places"]
    assert places[where]["module"] == name
    assert where == "forward" or places["forward"] is None


def test_a_twin_has_a_block_for_each_stage_and_the_job_arrives(tmp_path):
    layout = Layout(tp=1, pp=4, pp_style="interleaved", chunks=2)
    assert layout.ranks == 4 and layout.pipeline.stages == 8
    choice = find_config("llama", 1, layout.pipeline)
    assert choice.config.num_hidden_layers == 8
    job = prepare(choice, layout, 2, tmp_path)
    assert Job.read(tmp_path) == job and job.expected_all_reduces is None
    assert job.config().num_hidden_layers == 8
    assert shrink(job.config()).num_hidden_layers == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["llama", "--pp", "0"], "--pp 0"),
        (["llama", "--pp", "64"], "cannot be cut into 64 pipeline stages"),
        (["llama", "--pp", "2", "--dp", "2", "--zero-stage", "2"], "does not go together with --pp 2"),
        (["llama", "--pp", "2", "--pp-style", "zigzag"], "'zigzag' is no pipeline schedule"),
        (["llama", "--pp", "2", "--chunks", "5"], "cannot work with 5 stages on each rank"),
        (["llama", "--chunks", "2"], "--chunks 2 needs --pp 2"),
        (["llama", "--pp", "2", "--tp", "64"], "tp_size=64 does not fit"),
        (["resnet", "--pp", "2"], "cannot be"),
    ],
)
def test_what_cannot_be_run_ends_with_2_before_anything_starts(capsys, arguments, said):
    assert main(["verify", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_command_ends_with_0_or_1(tmp_path):
    done = colonnade("verify", "gpt2", "--pp", 2, "--steps", 2, "--certificate", tmp_path / "c.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tp 1 × pp 2 × dp 1, 1f1b beside one process" in done.stdout and done.stderr == ""
    done = colonnade("verify", "opt", "--pp", 2, "--tp", 2, "--steps", 2, "--policy", f"{WRONG}:BiasTooOften")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "model.decoder.layers.0.fc2 (BiasOnEachRank)" in done.stdout
