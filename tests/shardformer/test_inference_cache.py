"""A choice that has passed its check is kept: for the same model, code, ranks and versions, and for nothing else."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from colonnade.cluster.mesh import Axis
from colonnade.shardformer.inference import cache, infer, infer_policy
from colonnade.shardformer.inference.search import Choice

CHOICE = Choice({"model.layers.*.mlp.down_proj": 0}, "split", {})


def model(**changes):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=67, num_hidden_layers=2, **sizes | changes))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COLONNADE_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_held", {})
    return tmp_path


def two():
    return Axis("tp", 2, 0, (0, 1), None)


def test_a_choice_is_searched_once_and_found_by_a_later_process(monkeypatch):
    searches = []
    search = infer.search
    monkeypatch.setattr(infer, "search", lambda *args: searches.append(1) or search(*args))
    first = infer_policy(model(), two())
    cache._held.clear()  # as in another process
    second = infer_policy(model(), two())
    assert len(searches) == 1
    assert (first.levels, first.vocabulary) == (second.levels, second.vocabulary)
    assert len(second.split_regions) == 4


def test_what_a_choice_depends_on():
    key = cache.key_of(model(), 2)
    assert key == cache.key_of(model(), 2)
    assert key != cache.key_of(model(), 4)
    assert key != cache.key_of(model(hidden_act="gelu"), 2)
    other = type("Other", (LlamaForCausalLM,), {})
    assert key != cache.key_of(other(model().config), 2)
    assert cache.key_of(torch.nn.Linear(2, 3), 2) != cache.key_of(torch.nn.Linear(3, 2), 2)


def test_a_damaged_file_and_a_folder_that_cannot_be_written_cost_a_search_only(empty_cache, monkeypatch):
    cache.keep("key", CHOICE)
    cache._held.clear()
    assert cache.find("key") == CHOICE
    cache._held.clear()
    (file,) = (empty_cache / "policies").iterdir()
    for damaged in ("{", "[]", '{"levels": {}}'):
        file.write_text(damaged)
        assert cache.find("key") is None
    (empty_cache / "a file").touch()
    monkeypatch.setenv("COLONNADE_CACHE", str(empty_cache / "a file"))
    cache.keep("other", CHOICE)
    assert cache.find("other") == CHOICE, "for this process it is kept all the same"
