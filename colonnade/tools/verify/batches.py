"""Batches that let no fault hide: unequal numbers of targets, padding, ids from all of the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from colonnade.model.twin import WINDOW

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOKENS = 2 * WINDOW  # more than a window holds


def make_batches(config: PretrainedConfig, dp: int, causal: bool) -> list[dict[str, Any]]:
    """Two global batches, the same at every call.

    Args:
        config: the twin's.
        dp: data-parallel ranks, which share out the rows evenly.
        causal: labels are the inputs; else other ids, at some of the positions.
    """
    rows = dp * max(2, -(-4 // dp))
    text = config.get_text_config()
    generator = torch.Generator().manual_seed(7)
    usable = torch.tensor([i for i in range(text.vocab_size) if i not in _special_ids(config)])
    batches = []
    for padded in (False, True):
        ids, others = (usable[torch.randint(len(usable), (rows, TOKENS), generator=generator)] for _ in range(2))
        labels = ids.clone() if causal else others
        if not causal:
            labels = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.5, -100)
            labels[:, 0] = others[:, 0]  # each row has a target
        labels[0, TOKENS // 3 :] = -100  # the first row has fewer than the others
        batch = {"input_ids": ids, "labels": labels}
        if padded:
            mask = torch.ones_like(ids)
            for row in range(rows):
                mask[row, TOKENS - row % 4 :] = 0  # none, one, two and three positions at the end
            batch |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
            if text.is_encoder_decoder:
                batch["labels"] = labels  # the mask is the encoder's
        batches.append(batch)
    return batches


def _special_ids(config: PretrainedConfig) -> set[int]:
    """Ids with a meaning of their own: padding, whose embedding does not train, and places for images."""
    found: set[int] = set()
    for owner in (config, config.get_text_config()):
        for name, value in vars(owner).items():
            if name.endswith(("token_id", "token_index")):
                found |= set(value) if isinstance(value, list) else {value}
    return {i for i in found if isinstance(i, int)}
