"""`colonnade train` for real: the same numbers in every layout, and a folder that plain transformers loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from colonnade.tools.train.text import standard_library

SOURCES = ("argparse.py", "ast.py", "csv.py", "dataclasses.py", "json/decoder.py", "json/encoder.py", "shutil.py")
pytestmark = pytest.mark.timeout(400)  # several processes that each import torch and transformers, on whatever machine

COMMON = "--preset nano --vocab-size 320 --seq 32 --batch 12 --steps 6 --warmup 2 --eval-every 3 --eval-tokens 800 "


def train(arguments: str, text: Path, output: Path) -> subprocess.CompletedProcess[str]:
    """Run the command as a person would, from the checkout or the installed package."""
    command = [sys.executable, "-m", "colonnade.cli.main", "train", *arguments.split()]
    return subprocess.run(
        [*command, "--data", str(text), "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


def metrics(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def summary(output: Path) -> dict:
    return json.loads((output / "summary.json").read_text())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for name in SOURCES:
        (folder / name.replace("/", "_")).write_text((standard_library() / name).read_text())
    return folder


@pytest.fixture(scope="module")
def one_process(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of the run that all others are compared with."""
    output = tmp_path_factory.mktemp("runs") / "one"
    result = train(COMMON, text, output)
    assert result.returncode == 0, result.stdout + result.stderr
    return output


@pytest.mark.parametrize(
    "layout", ["--tp 3", "--tp 4", "--tp 2 --dp 2 --microbatch-size 3", "--tp 2 --dp 2 --zero-stage 2"]
)
def test_losses_are_those_of_one_process(layout, text, one_process, tmp_path):
    result = train(COMMON + layout, text, tmp_path / "out")
    assert result.returncode == 0, result.stdout + result.stderr
    uneven = result.stderr.count("shares LlamaForCausalLM out unevenly")
    assert uneven == (layout == "--tp 4"), "six heads on four ranks are told once"
    assert not uneven or "num_attention_heads 6 = 2 + 2 + 1 + 1" in result.stderr
    ours, reference = metrics(tmp_path / "out"), metrics(one_process)
    assert [line["step"] for line in ours] == [1, 2, 3, 4, 5, 6]
    for mine, other in zip(ours, reference):
        assert abs(mine["loss"] - other["loss"]) <= 1e-4
        assert abs(mine["grad_norm"] - other["grad_norm"]) <= 1e-4
        assert mine["lr"] == other["lr"]
    for key in ("held_out_loss", "unigram_entropy"):
        assert abs(summary(tmp_path / "out")[key] - summary(one_process)[key]) <= 1e-4
    assert ours[-1]["loss"] < ours[0]["loss"]
    check_loads_in_plain_transformers(tmp_path / "out")


PIPELINES = {
    "pp 2": "--pp 2",
    "uneven micro-batches": "--pp 2 --microbatches 5 --pp-style gpipe",
    "dp 2, ZeRO-1": "--pp 2 --dp 2 --zero-stage 1 --microbatch-size 2",
    "tp 2": "--pp 2 --tp 2 --microbatches 3",
}


@pytest.mark.sample("uneven*")
@pytest.mark.parametrize("layout", PIPELINES)
def test_a_pipeline_has_the_losses_of_one_process_and_leaves_its_trace(layout, text, one_process, tmp_path):
    result = train(COMMON + PIPELINES[layout], text, tmp_path / "out")
    assert result.returncode == 0, result.stdout + result.stderr
    for mine, other in zip(metrics(tmp_path / "out"), metrics(one_process), strict=True):
        for key in ("loss", "grad_norm", "lr", "held_out_loss"):
            assert abs(mine.get(key, 0) - other.get(key, 0)) <= 1e-4
    found = summary(tmp_path / "out")
    assert found["pp"] == 2 and found["parameters"] == summary(one_process)["parameters"]
    assert f" × pp 2 × dp {found['dp']}" in result.stdout and "sample " in result.stdout
    trace = json.loads((tmp_path / "out" / "pipeline_trace.json").read_text())
    number = {"pp 2": 4, "uneven micro-batches": 5, "dp 2, ZeRO-1": 3, "tp 2": 3}[layout]
    assert (trace["ranks"], trace["microbatches"], trace["style"]) == (2, number, found["pp_style"])
    done = {(e["kind"], e["stage"], e["microbatch"]) for e in trace["events"]}
    assert done == {(kind, stage, i) for kind in "FB" for stage in range(2) for i in range(number)}
    assert "pipeline_trace.json" in json.loads((tmp_path / "out" / "run.json").read_text())["files"]
    check_loads_in_plain_transformers(tmp_path / "out")


def test_fp16_with_zero_comes_close_and_says_its_loss_scale(text, one_process, tmp_path):
    result = train(COMMON + "--dp 2 --zero-stage 1 --precision fp16", text, tmp_path / "out")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "tp 1 × dp 2, ZeRO-1, fp16" in result.stdout
    assert all(line["loss_scale"] == 2**16 for line in metrics(tmp_path / "out"))
    assert abs(summary(tmp_path / "out")["held_out_loss"] - summary(one_process)["held_out_loss"]) <= 1e-2
    assert summary(tmp_path / "out")["steps_left_out"] == 0


def check_loads_in_plain_transformers(output: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(output)
    ids = tokenizer("import os", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        written = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(written[0]).startswith("import os")


def test_output_folder_holds_all_results_and_nothing_else(one_process):
    names = {file.name for file in one_process.iterdir()}
    assert names >= {"model.safetensors", "config.json", "tokenizer.json", "metrics.jsonl", "summary.json", "run.json"}
    assert names >= {"loss.png"}
    assert not any(name.startswith(".") for name in names)
    assert set(json.loads((one_process / "run.json").read_text())["files"]) == names
    check_loads_in_plain_transformers(one_process)


def test_saved_model_has_the_held_out_loss_of_the_summary(one_process, text):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from colonnade.tools.train.corpus import TokenSequences, evenly_spaced, join_tokens
    from colonnade.tools.train.text import read_documents, split_documents
    from colonnade.tools.train.vocabulary import encode_documents

    tokenizer = AutoTokenizer.from_pretrained(one_process)
    held_out = TokenSequences(
        join_tokens(encode_documents(tokenizer, split_documents(read_documents(text), 5).held_out)), 32
    )
    rows = evenly_spaced(len(held_out), 800 // 32)
    batch = {key: torch.stack([held_out[row][key] for row in rows]) for key in ("input_ids", "labels")}
    with torch.no_grad():
        loss = AutoModelForCausalLM.from_pretrained(one_process)(**batch).loss
    assert abs(float(loss) - summary(one_process)["held_out_loss"]) <= 1e-5


def test_output_is_not_written_over_and_can_be_fine_tuned(one_process, text, tmp_path):
    before = (one_process / "model.safetensors").read_bytes()
    refused = train(COMMON, text, one_process)
    assert refused.returncode == 2
    assert "is not empty" in refused.stderr
    assert (one_process / "model.safetensors").read_bytes() == before

    tuned = train(f"--model {one_process} --seq 32 --batch 4 --steps 2 --warmup 0", text, tmp_path / "tuned")
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    found = summary(tmp_path / "tuned")
    assert abs(found["held_out_loss_before"] - summary(one_process)["held_out_loss"]) < 0.1
    assert found["held_out_loss"] < found["held_out_loss_before"]
    assert all(line["grad_norm"] > 0 for line in metrics(tmp_path / "tuned"))
    assert "before training" in tuned.stdout


def test_processes_started_by_colonnade_run_are_used(one_process, text, tmp_path):
    command = [sys.executable, "-m", "colonnade.cli.main", "run", "--nproc-per-node", "2", "-m", "colonnade.cli.main"]
    result = subprocess.run(
        [*command, "train", *COMMON.split(), "--tp", "2", "--data", str(text), "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert abs(metrics(tmp_path / "out")[-1]["loss"] - metrics(one_process)[-1]["loss"]) <= 1e-4
    assert not (tmp_path / "out" / ".colonnade-train").exists()
