"""docs/models.md lists what the installed transformers has, and the script that writes it finds what is so."""

import sys
from pathlib import Path

import pytest

from colonnade.testing.ranks import run_on_ranks

ROOT = Path(__file__).parent.parent


def look_at(scripts, args, fields):
    """As the script's; on a rank, which has to find the script first."""
    sys.path.insert(0, scripts)
    try:
        import model_cases
        import model_look
    finally:
        sys.path.remove(scripts)
    return model_look.look_at(model_cases.Case(*args, **fields))


def row_of(*args, tp=2, **fields):
    """What the ranks find for a case."""
    return run_on_ranks(tp, look_at, str(ROOT / "scripts"), args, fields, timeout_s=100)[0]


@pytest.fixture
def model_table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import model_table

    return model_table


@pytest.fixture
def model_look(model_table):
    import model_look

    return model_look


@pytest.fixture
def model_page(model_table):
    import model_page

    return model_page


def test_the_page_lists_every_language_model_of_transformers(model_table):
    page = model_table.PAGE.read_text(encoding="utf-8")
    assert model_table.check(page) == []
    lines = page.splitlines(keepends=True)
    gemma = next(line for line in lines if line.startswith("| `gemma2` |"))
    assert model_table.check(page.replace(gemma, "")) == ["docs/models.md lacks gemma2: run `make models`"]
    other = gemma.replace("gemma2", "no_such")
    assert "there is not, no_such" in model_table.check(page.replace(gemma, gemma + other))[0]


def test_the_page_lists_every_variant(model_table):
    page = model_table.PAGE.read_text(encoding="utf-8")
    variant = next(line for line in page.splitlines(keepends=True) if line.startswith("| `starcoder2`: "))
    assert model_table.check(page.replace(variant, "")) == [
        "docs/models.md lacks the variant starcoder2: no biases: run `make models`"
    ]


def test_two_families_are_looked_at(model_table, model_look, model_page):
    cases = [model_table.Case("qwen3", "Qwen3ForCausalLM"), model_table.Case("cohere", "CohereForCausalLM")]
    found = [model_page.Found(case, {tp: row_of(case.family, case.model, tp=tp) for tp in (2, 4)}) for case in cases]
    assert [(f.first.verdict, f.first.regions) for f in found] == [(model_look.ALL, (4, 4))] * 2
    assert [f.first.policy for f in found] == ["file", "inferred"]
    rows = [row for f in found for row in f.rows.values()]
    assert all(row.proved and 0 < max(row.worst.values()) <= 1e-5 for row in rows)
    text = model_page.rows_text(found)
    assert text.index("`cohere`") < text.index("`qwen3`") and "4 of 4" in text
    assert "2 of 2 (100.0 %)" in model_page.summary(found) and not model_page.failure_lines(found)


def cut(scripts, args, fields):
    """As the script's; on a rank."""
    sys.path.insert(0, scripts)
    try:
        import model_cases
        import model_cut
    finally:
        sys.path.remove(scripts)
    return model_cut.cut(model_cases.Case(*args, **fields))


def test_families_are_cut(model_table, model_look, model_page):
    pairs = [
        (("qwen3", "Qwen3ForCausalLM"), {}),
        (("t5", "T5ForConditionalGeneration", "others"), {}),
        (("gemma3n_text", "Gemma3nForCausalLM"), {}),
        (("mixtral", "MixtralForCausalLM", "variants", "router loss"), {"changes": {"output_router_logits": True}}),
        (("own", "small-gpt", "variants", "plain module"), {}),
    ]
    rows = [run_on_ranks(1, cut, str(ROOT / "scripts"), *pair, timeout_s=100)[0] for pair in pairs]
    found = [model_page.Found(model_table.Case(*p[0], **p[1]), {model_page.PP: row}) for p, row in zip(pairs, rows)]
    assert [row.verdict for row in rows] == ["cut", "cut", "cut", model_look.REFUSED, "cut"]
    assert [model_page.cut_cell(f) for f in found[:2]] == ["3 of 3", "7 of 7"]
    assert rows[2].regions[0] < rows[2].regions[1], "some layers share keys and values"
    assert "all blocks have to stay together" in model_page.cut_cell(found[3])
    assert "causal language models, types | 2 of 2 (100.0 %) | 1 of 2 (50.0 %)" in model_page.cut_table(found)


def test_a_family_with_a_file_is_inferred_where_that_is_asked_for(model_look):
    row = row_of("qwen3", "Qwen3ForCausalLM", forced=True)
    assert (row.verdict, row.policy) == (model_look.ALL, "inferred") and row.proved


def test_a_variant_and_a_model_of_our_own(model_look):
    fields = {"attention_bias": True, "mlp_bias": True}
    assert row_of("llama", "LlamaForCausalLM", title="biases", changes=fields).verdict == model_look.ALL
    assert row_of("own", "grouped", title="plain module").proved


def test_what_cannot_be_built_gets_a_row(model_look):
    row = row_of("llama", "NoSuchModel")
    assert row.verdict == model_look.UNBUILT and "NoSuchModel" in row.remark


def test_counted_is_what_makes_a_model(model_look, model_page, model_table):
    good = model_look.Row(model_look.ALL, "inferred", (4, 4), "split", {"loss": 1e-7})
    bad = model_look.Row(model_look.REFUSED, "inferred", remark="no")
    none = model_look.Row(model_look.UNBUILT, remark=model_look.NO_DEFAULT + "no")
    rows = [("a", "A", good), ("b", "A", bad), ("c", "C", good), ("d", "D", none)]
    found = [model_page.Found(model_table.Case(family, name), {2: row}) for family, name, row in rows]
    counts = {name: count(2) for name, count in model_page.counts(found)}
    assert counts["causal language models, types"] == (2, 3)
    assert counts["causal language models, classes"] == (1, 2)
    assert "refused: no\n        b at tp 2" in model_page.failure_lines(found)


def test_rows_are_kept(tmp_path, model_table, model_look, monkeypatch):
    row = model_look.Row(model_look.ALL, "file", (4, 4), "split", {"loss": 1e-7}, "", 1.5)
    monkeypatch.setattr(model_table, "look", lambda case, tp: row)
    cases = model_table.chosen(model_table.wanted(), "gemma2,GPT2LMHeadModel", "causal")
    assert {case.family for case in cases} == {"gemma2", "gpt2", "gpt-sw3"}
    first = model_table.look_at_all(cases, (2, 4), tmp_path / "rows.json")
    monkeypatch.setattr(model_table, "look", None)
    assert model_table.look_at_all(cases, (2, 4), tmp_path / "rows.json") == first


# each was refused, failed in training or stayed whole for a reason that lay in the inference of policies
FOUND_BY_THE_TABLE = {
    ("big_bird", "BigBirdForCausalLM"): (4, 4),  # changes in its first forward; its attention is gathered
    ("fuyu", "FuyuForCausalLM"): (4, 4),  # takes pictures too
    ("stablelm", "StableLmForCausalLM"): (4, 4),  # a width inside a head is as large as the number of heads
}


def test_what_the_table_has_found_stays_mended(model_look):
    rows = [row_of(*pair) for pair in FOUND_BY_THE_TABLE]
    assert [row.regions for row in rows] == list(FOUND_BY_THE_TABLE.values())
    assert all(row.worst and max(row.worst.values()) <= 1e-5 for row in rows)
