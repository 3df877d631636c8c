"""Inferred policies beside transformers' own plans: every difference has an explanation, and docs/agreement.md is up to date."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def agreement(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import plan_agreement

    return plan_agreement


def test_the_page_lists_every_family_with_a_plan(agreement):
    page = agreement.PAGE.read_text(encoding="utf-8")
    assert agreement.check_page(page) == [] and "NOT EXPLAINED" not in page
    glm = next(line for line in page.splitlines(keepends=True) if line.startswith("| `glm` |"))
    assert agreement.check_page(page.replace(glm, "")) == ["docs/agreement.md lacks glm: run `make agreement`"]


@pytest.mark.timeout(600)  # half a minute of work, on a machine that may be busy
def test_every_difference_is_explained(agreement):
    """As inference finds the policies; with their checks it takes minutes, and `make agreement` does it."""
    found = agreement.look(check=False)
    assert len(found) > 100
    assert agreement.problems(found) == []
    counts = agreement.counted(found)
    assert counts[agreement.THEIRS] < 0.05 * counts[agreement.SAME]


def test_some_are_compared_as_checked(agreement):
    found = agreement.look("gemma2, glm, deepseek_v2, doge")
    assert agreement.problems(found) == []
    kinds = {c.family: {d.kind for d in c.differences} for c in found}
    assert kinds["gemma2"] == set() and kinds["glm"] == {agreement.LOGITS, agreement.ACTIVATIONS}
    assert agreement.EXPERTS in kinds["deepseek_v2"] and agreement.THEIRS in kinds["doge"]


def test_a_difference_is_seen_and_told(agreement, monkeypatch):
    [llama] = agreement.look("llama", check=False)
    assert (
        llama.same == 8
        and [d.kind for d in llama.differences] == [agreement.LOGITS]
        and not agreement.problems([llama])
    )
    kind, config = next(found[1:] for found in agreement.families() if found[0] == "llama")
    plan = {"layers.*.mlp.down_proj": "colwise", "layers.*.input_layernorm": "colwise"}
    monkeypatch.setattr(type(config), "base_model_tp_plan", plan)
    changed = agreement.compare("llama", kind, config, check=False)
    told = {d.name.rpartition("layers.*.")[2]: (d.kind, d.theirs, d.ours) for d in changed.differences}
    assert told["mlp.down_proj.weight"] == (agreement.THEIRS, "colwise", agreement.ROW)
    assert told["input_layernorm.weight"] == (agreement.THEIRS, "colwise", agreement.WHOLE)
    assert told["self_attn.q_proj.weight"] == (agreement.OURS, agreement.WHOLE, agreement.COLUMN)
    assert len(agreement.problems([changed])) == 2
    assert "NOT EXPLAINED" in agreement.page([changed])


def test_an_explanation_without_a_difference_is_told(agreement, monkeypatch):
    monkeypatch.setitem(agreement.EXPLAINED, ("llama", "q_proj"), "because")
    assert agreement.stale(agreement.look("llama", check=False)) == [("llama", "q_proj")]
