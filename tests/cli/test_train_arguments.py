"""Arguments of `colonnade train` that cannot work: exit code 2 and what to do, before a process is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colonnade.cli import train as command
from colonnade.cli.main import main
from colonnade.errors import ConfigError
from colonnade.tools.train.options import TrainOptions, layout_sizes
from colonnade.tools.train.output import check_output, claim_output, publish, remove_work

TEXT = "def f(x):\n    return x + 1\n" * 400


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(4):
        (folder / f"{n}.py").write_text(TEXT)
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of processes that would have been started."""
    calls: list[int] = []
    monkeypatch.setattr(command, "start_workers", lambda nproc, argv, module=None: calls.append(nproc) or 0)
    return calls


def llama_folder(folder: Path, **changes: object) -> Path:
    from transformers import LlamaConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaConfig(**sizes | {"intermediate_size": 64, "max_position_embeddings": 16} | changes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--preset tinny", ["no preset called 'tinny'", "--preset tiny"]),
        (
            "--preset nano --tp 7",
            ["tp_size=7 does not fit LlamaForCausalLM", "num_attention_heads  6 for 7 ranks", "tp_size=6 or less"],
        ),
        ("--preset nano --dp 3", ["--batch", "16 sequences cannot be shared equally by 3", "try 15 or 18"]),
        ("--preset nano --nproc 4 --tp 3", ["4 processes cannot be laid out as --tp 3", "--tp 1 or 2 or 4"]),
        ("--preset nano --nproc 4 --tp 2 --dp 1", ["needs  2 processes", "--dp 2"]),
        ("--preset nano --tp 0", ["whole numbers of at least 1"]),
        ("--preset nano --batch 16 --dp 2 --microbatch-size 3", ["3 does not divide the 8 sequences", "1, 2, 4, 8"]),
        ("--preset nano --steps 0 --lr -1 --seq 1", ["3 problems", "--steps", "--lr", "--seq"]),
        ("--preset nano --precision fp64", ["'fp64' is not one of fp32, bf16"]),
        ("--preset nano --pp 9", ["cannot be cut into 9 pipeline stages", "found  2 blocks"]),
        ("--preset nano --nproc 4 --tp 2 --pp 3", ["4 processes cannot be laid out as --tp 2 --pp 3", "multiple of 6"]),
        ("--preset nano --pp 2 --pp-style zigzag", ["--pp-style", "'zigzag' is not one of gpipe, 1f1b"]),
        ("--preset nano --pp-style gpipe", ["--pp-style", "gpipe needs --pp 2 or more"]),
        ("--preset nano --pp 2 --dp 2 --zero-stage 2", ["--zero-stage", "1 deals the optimizer's states out"]),
        ("--preset nano --pp 2 --microbatches 17", ["--microbatches", "17 for the 16 sequences of a rank"]),
        ("--preset nano --pp 2 --microbatches 4 --microbatch-size 4", ["--microbatches", "the other follows"]),
        ("--preset nano --dp 2 --zero-stage 3", ["--zero-stage", "3 is not one of 0, 1, 2"]),
        ("--preset nano --held-out 100", ["between 0 and 100 percent"]),
        ("--preset nano --vocab-size 100", ["at least 257"]),
        ("--preset nano --data MISSING", ["MISSING does not exist"]),
        ("--preset nano --seq 100000", ["too little text", "0 sequences, fewer than a batch of 16", "--seq"]),
        ("--model MISSING", ["is not a local model", "nothing there", ".gguf"]),
        ("--model TEXT", ["holds no model", "no config.json"]),
    ],
)
def test_bad_argument_is_explained_before_a_process_starts(arguments, words, text, tmp_path, started, capsys):
    given = [str(text) if word == "TEXT" else word for word in arguments.split()]
    if "--data" not in given:
        given += ["--data", str(text)]
    output = tmp_path / "out"
    assert main(["train", *given, "--output", str(output)]) == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message
    assert not started
    assert not output.exists()


def test_sequence_longer_than_the_model_is_refused(text, tmp_path, started, capsys):
    model = llama_folder(tmp_path / "model")
    code = main(["train", "--model", str(model), "--seq", "32", "--data", str(text), "--output", str(tmp_path / "out")])
    assert code == 2
    assert "--seq 32 is longer than the model's 16 positions" in capsys.readouterr().err
    assert not started


def test_model_without_a_tokenizer_is_refused(text, tmp_path, started, capsys):
    model = llama_folder(tmp_path / "model")
    code = main(["train", "--model", str(model), "--seq", "8", "--data", str(text), "--output", str(tmp_path / "out")])
    assert code == 2
    assert "no tokenizer that transformers can load" in capsys.readouterr().err


def test_several_gguf_files_need_a_choice(text, tmp_path, started, capsys):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    assert main(["train", "--model", str(tmp_path), "--data", str(text), "--output", str(tmp_path / "out")]) == 2
    assert "holds 2 GGUF files" in capsys.readouterr().err


def test_good_arguments_start_tp_times_dp_processes_and_leave_no_work_folder(text, tmp_path, started, capsys):
    output = tmp_path / "out"
    arguments = ["--preset", "nano", "--tp", "3", "--nproc", "6", "--zero-stage", "2", "--seq", "16", "--data"] + [
        str(text)
    ]
    assert main(["train", *arguments, "--output", str(output)]) == 0
    assert started == [6]
    assert "starting 6 processes: tp 3 × dp 2, ZeRO-2" in capsys.readouterr().out
    assert [file.name for file in output.iterdir()] == ["run.json"]


def test_heads_that_do_not_divide_are_no_mistake(text, tmp_path, started, capsys):
    """Six heads on four ranks. It is the ranks that say so, once."""
    arguments = ["--preset", "nano", "--tp", "4", "--seq", "16", "--data", str(text), "--output", str(tmp_path / "out")]
    assert main(["train", *arguments]) == 0
    assert started == [4]
    assert "uneven" not in capsys.readouterr().err


def test_default_is_the_tiny_preset_and_a_lower_rate_for_a_given_model():
    from_scratch = parse(["--output", "o"])
    tuned = parse(["--output", "o", "--model", "m"])
    assert (from_scratch.model.preset, from_scratch.optimizer.learning_rate) == ("tiny", 3e-3)
    assert (tuned.model.preset, tuned.optimizer.learning_rate) == (None, 5e-5)


def parse(arguments: list[str]) -> TrainOptions:
    import argparse

    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["train", *arguments])
    return command.options_from(args, args.nproc)


def test_options_survive_the_way_to_the_ranks():
    layout = ["--tp", "2", "--dp", "2", "--microbatch-size", "2", "--zero-stage", "1", "--precision", "fp16"]
    options = parse(["--output", "o", "--data", "d", "--prompt", "hi", "--max-norm", "0.5", *layout])
    assert TrainOptions.from_json(json.loads(json.dumps(options.to_json()))) == options
    assert (options.layout.zero_stage, options.layout.precision) == (1, "fp16")
    options = parse(["--output", "o", "--pp", "2", "--pp-style", "gpipe", "--microbatches", "4"])
    assert TrainOptions.from_json(json.loads(json.dumps(options.to_json()))) == options
    assert (options.layout.ranks, options.layout.pp_style, options.layout.microbatches) == (2, "gpipe", 4)


@pytest.mark.parametrize(
    ("tp", "dp", "nproc", "sizes"),
    [(2, None, None, (2, 1)), (2, None, 6, (2, 3)), (1, 4, None, (1, 4)), (2, 2, 4, (2, 2))],
)
def test_data_axis_fills_the_processes(tp, dp, nproc, sizes):
    assert layout_sizes(tp, dp, nproc) == sizes
    assert layout_sizes(tp, dp, nproc and 3 * nproc, pp=3) == sizes


def test_folder_with_foreign_files_is_never_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="did not write"):
            check_output(tmp_path, overwrite)
    with pytest.raises(ConfigError, match="is a file"):
        check_output(tmp_path / "thesis.txt", True)
    with pytest.raises(ConfigError, match="is a file"):
        check_output(tmp_path / "thesis.txt" / "below", True)


def test_overwrite_removes_only_what_the_earlier_run_has_written(tmp_path):
    folder = tmp_path / "out"
    work = claim_output(folder, {})
    (folder / "metrics.jsonl").write_text("{}")
    ready = work / "ready"
    ready.mkdir()
    for name in ("config.json", "model.safetensors"):
        (ready / name).write_text("old")
    publish(folder, ready, {})
    remove_work(folder)
    (folder / "notes.md").write_text("mine")

    with pytest.raises(ConfigError, match="--overwrite to replace it"):
        check_output(folder, False)
    check_output(folder, True)
    claim_output(folder, {})
    remove_work(folder)
    assert sorted(file.name for file in folder.iterdir()) == ["notes.md", "run.json"]


def test_listed_names_that_lead_out_of_the_folder_are_not_followed(tmp_path):
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    folder = tmp_path / "out"
    claim_output(folder, {})
    remove_work(folder)
    marker = json.loads((folder / "run.json").read_text())
    marker["files"] += ["../outside.txt", str(outside)]
    (folder / "run.json").write_text(json.dumps(marker))
    claim_output(folder, {})
    assert outside.read_text() == "mine"


def test_output_must_not_replace_the_model_that_is_trained(tmp_path, text, started, capsys):
    model = llama_folder(tmp_path / "model")
    claim = {"command": "colonnade train", "files": ["run.json", "config.json"]}
    (model / "run.json").write_text(json.dumps(claim))
    arguments = ["--model", str(model), "--data", str(text), "--seq", "8", "--output", str(model), "--overwrite"]
    assert main(["train", *arguments]) == 2
    assert "is what the run reads from" in capsys.readouterr().err
    assert (model / "config.json").exists()
