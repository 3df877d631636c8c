"""Models whose weights the hub stores in another form: saved, loaded and exported as transformers itself would.

`python scripts/model_hub.py` looks at all models of docs/models.md.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import model_hub
from model_cases import FORCED, all_cases

FAMILIES = (
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "phi3",
    "gpt2",
    "t5",
    "bert",
    "mamba",
    "gemma3_text",
    "bloom",
)
CASES = [c for c in all_cases(frozenset()) if c.family in FAMILIES and c.section not in (FORCED, "variants")]


def test_the_families_are_there():
    assert {case.family for case in CASES} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.family)
def test_folders_are_those_of_transformers(case):
    assert model_hub.look(case) == model_hub.SAME
