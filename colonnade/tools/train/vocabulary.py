"""The tokenizer: the model's own, or a byte-level BPE learned from the text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from colonnade.errors import ConfigError, explain
from colonnade.tools.train.text import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte, and the end of a text


def learn_tokenizer(documents: Iterable[Document], vocab_size: int, positions: int) -> PreTrainedTokenizerBase:
    """Learn a byte-level BPE vocabulary; the same documents always give the same vocabulary.

    Any text can be written in it, since every single byte is a token. One special token marks the end of a text, begins
    one, and pads.

    Args:
        vocab_size: number of tokens, at most; a short text may not have as many pairs to merge.
        positions: longest sequence of the model, noted in the tokenizer's files.

    Raises:
        ConfigError: when `vocab_size` has no room for the 256 bytes and the end of a text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            explain(
                f"--vocab-size {vocab_size} is too small.",
                [("needs", f"at least {SMALLEST_VOCABULARY}: the 256 bytes and the end of a text")],
            )
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )


def encode_documents(tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document]) -> list[list[int]]:
    """Token ids of each document, closed by the tokenizer's end-of-sequence token where it has one."""
    texts = [document.text for document in documents]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # the fast ones take all texts at once, and do not warn of texts longer than the model
        encoded = [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
    else:
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [ids + end for ids in encoded]
