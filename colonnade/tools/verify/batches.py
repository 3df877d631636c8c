"""Batches that let no fault hide: unequal numbers of targets, padding, ids from all of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch

from colonnade.shardformer.inference.probe import IGNORED, TARGETS, predicts_next, probe_inputs


def make_batches(model: Any, dp: int = 1, share: int | None = None) -> list[dict[str, Any]]:
    """Two global batches with everything that a model's forward takes, the same at every call.

    Where targets are one for each token, the first row has fewer of them than the others, and an encoder only some; and the
    second batch has padding, except where the mask is of another sequence than the targets.

    Args:
        model: the twin.
        dp: data-parallel ranks, which share out the rows evenly.
        share: rows of each of them; by default so that there are at least 4, and 2 for each.
    """
    rows = dp * (share or max(2, -(-4 // dp)))
    return [_batch(model, rows, seed, padded=seed == 8) for seed in (7, 8)]


def _batch(model: Any, rows: int, seed: int, padded: bool) -> dict[str, Any]:
    batch = probe_inputs(model, torch.device("cpu"), rows=rows, seed=seed)
    mask = batch.pop("attention_mask", None)
    target = next((name for name in TARGETS if name in batch), None)
    ids = batch.get("input_ids")
    of_tokens = target is not None and batch[target].dim() == 2
    if target is not None and of_tokens and hasattr(model, "config"):
        batch[target] = _fewer(batch[target], predicts_next(model), seed)
    if padded and mask is not None and ids is not None and len(ids) == rows:
        for row in range(rows):
            mask[row, mask.shape[1] - row % 4 :] = 0  # none, one, two and three positions at the end
        batch["attention_mask"] = mask
        if target is not None and of_tokens and batch[target].shape == mask.shape and "decoder_input_ids" not in batch:
            batch[target] = batch[target].masked_fill(mask == 0, IGNORED)
    return batch


def _fewer(labels: torch.Tensor, causal: bool, seed: int) -> torch.Tensor:
    """Targets in unequal numbers, at least one in each row."""
    fewer = labels.clone()
    if not causal:
        generator = torch.Generator().manual_seed(seed)
        fewer = fewer.masked_fill(torch.rand(labels.shape, generator=generator) < 0.5, IGNORED)
        fewer[:, 0] = labels[:, 0]
    placed = int((labels[0] == IGNORED).long().cumprod(0).sum())  # places for a picture come first and are no targets
    fewer[0, placed + (labels.shape[1] - placed) // 3 :] = IGNORED
    return fewer
