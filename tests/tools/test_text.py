"""Text, vocabulary and token files of `colonnade train`: what is read, what is held out, what the ranks get."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.errors import ConfigError
from colonnade.tools.train.corpus import TokenSequences, evenly_spaced, join_tokens, rank_share, unigram_entropy
from colonnade.tools.train.text import Document, read_documents, split_documents, standard_library
from colonnade.tools.train.vocabulary import encode_documents, learn_tokenizer


def write(folder: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_standard_library_has_its_own_modules_and_no_tests_or_packages():
    names = [document.name for document in read_documents(None)]
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    assert not any(part in {"test", "tests", "site-packages"} for name in names for part in name.split("/"))
    assert standard_library() == Path(sys.modules["os"].__file__).parent


def test_folder_is_read_in_the_order_of_names_and_only_text_counts(tmp_path):
    write(tmp_path, b="two", a="one", sub__c="three", empty="", binary=b"\0\1", latin=b"caf\xe9", **{".hidden": "x"})
    assert [(d.name, d.text) for d in read_documents(tmp_path)] == [("a", "one"), ("b", "two"), ("sub/c", "three")]


def test_the_output_folder_inside_the_text_folder_is_passed_over(tmp_path):
    write(tmp_path, a="one", out__metrics="{}")
    assert [d.name for d in read_documents(tmp_path, leave_out=tmp_path / "out")] == ["a"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "missing", "does not exist"),
        (lambda p: p, "no files"),
        (lambda p: write(p, x=b"\0") and p, "1 files, none of them UTF-8 text"),
        (lambda p: write(p, x=b"\0") / "x", "not a text file"),
        (lambda p: write(p, x=b"") / "x", "is empty"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, make, message):
    with pytest.raises(ConfigError, match=message):
        read_documents(make(tmp_path))


def test_same_documents_are_held_out_every_time():
    documents = [Document(f"f{n:02d}", "x" * 100) for n in range(40)]
    split = split_documents(documents, 10)
    assert split == split_documents(documents, 10)
    assert len(split.held_out) == 4
    assert [d.name for d in split.held_out] != [f"f{n:02d}" for n in range(36, 40)]  # a mixture, not the last by name


@given(sizes=st.lists(st.integers(1, 500), min_size=2, max_size=30), percent=st.floats(0.5, 99))
@settings(max_examples=50, deadline=None)
def test_every_document_is_in_exactly_one_part_and_both_have_one(sizes, percent):
    documents = [Document(str(n), "x" * size) for n, size in enumerate(sizes)]
    split = split_documents(documents, percent)
    assert split.train and split.held_out
    assert sorted((*split.train, *split.held_out), key=lambda d: int(d.name)) == documents
    most = max(sizes)
    assert sum(len(d.text) for d in split.held_out) <= max(most, sum(sizes) * percent / 100)


def test_single_document_is_cut_between_lines():
    text = "".join(f"line {n}\n" for n in range(100))
    split = split_documents([Document("t", text)], 10)
    head, tail = split.train[0].text, split.held_out[0].text
    assert head + tail == text
    assert head.endswith("\n")
    assert 0.08 < len(tail) / len(text) < 0.12
    with pytest.raises(ConfigError, match="single line"):
        split_documents([Document("t", "no line break")], 10)


def test_learned_vocabulary_writes_any_text_and_loads_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    documents = [Document("a", "for item in items:\n    print(item)\n" * 20)]
    tokenizer = learn_tokenizer(documents, 300, 64)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in (documents[0].text, "naïve ☂ tabs\t and \r\n", "<|x|>"):
        ids = loaded(text, add_special_tokens=False)["input_ids"]
        assert loaded.decode(ids) == text
        assert [*ids, tokenizer.eos_token_id] == encode_documents(tokenizer, [Document("t", text)])[0]
    assert len(loaded) <= 300
    assert learn_tokenizer(documents, 300, 64).get_vocab() == tokenizer.get_vocab()


def test_vocabulary_without_room_for_all_bytes_is_refused():
    with pytest.raises(ConfigError, match="at least 257"):
        learn_tokenizer([Document("a", "x")], 256, 64)


def test_sequences_cover_the_tokens_without_overlap(tmp_path):
    tokens = join_tokens([[1, 2, 3], [4, 5, 6, 7]])
    assert tokens.dtype == np.uint16
    np.save(tmp_path / "t.npy", tokens)
    data = TokenSequences.open(tmp_path / "t.npy", 3)
    assert [data[i]["input_ids"].tolist() for i in range(len(data))] == [[1, 2, 3], [4, 5, 6]]
    assert torch.equal(data[0]["labels"], data[0]["input_ids"])
    assert join_tokens([[70000]]).dtype == np.uint32


@given(available=st.integers(1, 100), wanted=st.integers(1, 100))
def test_evenly_spaced_numbers_are_distinct_and_within_bounds(available, wanted):
    rows = evenly_spaced(available, wanted)
    assert len(set(rows)) == len(rows) == min(available, wanted)
    assert all(0 <= row < available for row in rows)


def test_ranks_share_a_batch_and_missing_rows_have_no_targets():
    data = TokenSequences(np.arange(15), 3)
    rows = [data[n] for n in range(5)]
    shares = [rank_share(rows, rank, 2) for rank in range(2)]
    assert shares[0]["input_ids"][:, 0].tolist() == [0, 6, 12]
    assert shares[1]["input_ids"][:, 0].tolist()[:2] == [3, 9]
    assert shares[1]["labels"][2].tolist() == [-100] * 3
    assert shares[0]["labels"].shape == shares[1]["labels"].shape


def test_unigram_entropy_of_two_tokens_by_hand():
    # counts 3 + 1 and 1 + 1 of a vocabulary of two: frequencies 2/3 and 1/3
    entropy = unigram_entropy(np.array([0, 0, 0, 1]), np.array([0, 1]), 2)
    assert entropy == pytest.approx(-(math.log(2 / 3) + math.log(1 / 3)) / 2)
    assert math.isfinite(unigram_entropy(np.array([0]), np.array([5]), 8))
