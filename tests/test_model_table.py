"""docs/models.md lists what the installed transformers has, and the script that writes it finds what is so."""

import sys
from pathlib import Path

import pytest

from colonnade.testing.ranks import run_on_ranks

ROOT = Path(__file__).parent.parent


def look_at(scripts, *pair):
    """As the script's; on a rank, which has to find the script first."""
    sys.path.insert(0, scripts)
    try:
        import model_look
    finally:
        sys.path.remove(scripts)
    return model_look.look_at(*pair)


@pytest.fixture
def model_table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import model_table

    return model_table


@pytest.fixture
def model_look(model_table):
    import model_look

    return model_look


def test_the_page_lists_every_language_model_of_transformers(model_table):
    page = model_table.PAGE.read_text(encoding="utf-8")
    assert model_table.check(page) == []
    lines = page.splitlines(keepends=True)
    gemma = next(line for line in lines if line.startswith("| `gemma2`"))
    assert model_table.check(page.replace(gemma, "")) == ["docs/models.md lacks gemma2: run `make models`"]
    other = gemma.replace("gemma2", "no_such")
    assert "transformers has not, no_such" in model_table.check(page.replace(gemma, gemma + other))[0]


def test_two_families_are_looked_at(model_table, model_look):
    qwen3, olmo2 = (
        run_on_ranks(2, look_at, str(ROOT / "scripts"), *pair)[0]
        for pair in (("qwen3", "Qwen3ForCausalLM"), ("olmo2", "Olmo2ForCausalLM"))
    )
    assert (qwen3.verdict, qwen3.policy, qwen3.regions) == (model_look.ALL, "file", (4, 4))
    assert (olmo2.verdict, olmo2.policy, olmo2.regions) == (model_look.SOME, "inferred", (2, 4))
    assert "k_norm.weight" in olmo2.remark
    assert all(0 < value <= 1e-5 for row in (qwen3, olmo2) for value in row.worst.values())
    text = model_table.model_rows([qwen3, olmo2])
    assert text.index("`olmo2`") < text.index("`qwen3`") and "2 of 4" in text


def test_what_cannot_be_built_gets_a_row(model_look):
    row = model_look.look_at("no_such_family", "LlamaForCausalLM")
    assert row.verdict == model_look.UNBUILT and "no_such_family" in row.remark


# each was refused, failed in training or stayed whole for a reason that lay in the inference of policies
FOUND_BY_THE_TABLE = {
    ("big_bird", "BigBirdForCausalLM"): (2, 4),  # changes in its first forward
    ("fuyu", "FuyuForCausalLM"): (2, 4),  # takes pictures too
    ("stablelm", "StableLmForCausalLM"): (4, 4),  # a width inside a head is as large as the number of heads
}


def test_what_the_table_has_found_stays_mended(model_look):
    rows = [run_on_ranks(2, look_at, str(ROOT / "scripts"), *pair)[0] for pair in FOUND_BY_THE_TABLE]
    assert [row.regions for row in rows] == list(FOUND_BY_THE_TABLE.values())
    assert all(row.worst and max(row.worst.values()) <= 1e-5 for row in rows)
