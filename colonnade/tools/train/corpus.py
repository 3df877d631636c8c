"""Token ids as the training run reads them: one file of training tokens, one of held-out tokens, cut into sequences.

Letters: S tokens in a sequence, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

IGNORED = -100  # the label of a token that is not a target


def join_tokens(encoded: Sequence[Sequence[int]]) -> np.ndarray:
    """All documents one after the other, in the smallest integer type that holds the ids."""
    tokens = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in encoded])
    return tokens.astype(np.uint16 if tokens.max(initial=0) < 2**16 else np.uint32)


class TokenSequences(Dataset):
    """Sequences of S tokens, without overlap, cut from one long row of tokens; an incomplete last one is left out.

    Items are what a causal language model takes: `input_ids` and `labels`, both int64 of shape [S]. The model itself
    shifts the labels, so that a sequence has S − 1 targets.

    Args:
        tokens: [T] integers; may be memory-mapped.
        length: S.
    """

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.tokens = tokens
        self.length = length

    @classmethod
    def open(cls, file: Path, length: int) -> TokenSequences:
        """Sequences of a .npy file, which the ranks of a machine share as one memory map."""
        return cls(np.load(file, mmap_mode="r"), length)

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.tokens[index * self.length : (index + 1) * self.length].astype(np.int64)
        ids = torch.from_numpy(piece)
        return {"input_ids": ids, "labels": ids.clone()}


def evenly_spaced(available: int, wanted: int) -> list[int]:
    """At most `wanted` of the numbers 0 … available − 1, spread evenly over them."""
    count = min(available, wanted)
    return [position * available // count for position in range(count)]


def rank_share(rows: Sequence[dict[str, torch.Tensor]], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """The part of a global batch that one data-parallel rank takes.

    Every rank gets equally many rows; what is missing at the end is filled with rows that have no targets.

    Args:
        rows: the rows of the global batch, as `TokenSequences` gives them.
        rank, ranks: the data-parallel rank and the number of them.

    Returns:
        `input_ids` and `labels`, each [rows of this rank, S].
    """
    blank = {"input_ids": rows[0]["input_ids"], "labels": torch.full_like(rows[0]["labels"], IGNORED)}
    padded = list(rows) + [blank] * (-len(rows) % ranks)
    mine = padded[rank::ranks]
    return {key: torch.stack([row[key] for row in mine]) for key in blank}


def unigram_entropy(train: np.ndarray, targets: np.ndarray, vocab_size: int) -> float:
    """How well token frequencies alone predict a text, in nats per token: a model that has learned more is below it.

    Frequencies are those of the training tokens, with one added to every count, since a token that occurs in the
    held-out text only would otherwise make the answer infinite.

    Args:
        train: [T] training tokens.
        targets: the held-out tokens to be predicted, the same that the held-out loss is measured on.
        vocab_size: V.
    """
    counts = np.bincount(train, minlength=vocab_size).astype(np.float64) + 1.0
    log_frequency = np.log(counts) - np.log(counts.sum())
    return float(-log_frequency[np.asarray(targets, dtype=np.int64)].mean())
