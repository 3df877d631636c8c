"""Measuring a model on held-out text, and letting it write; every rank takes part in both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from colonnade.booster import Booster
from colonnade.cluster.device import current_device
from colonnade.tools.train.corpus import rank_share

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Within it the model neither drops out nor records a graph; afterwards it is as before."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def held_out_loss(booster: Booster, model: torch.nn.Module, data: Dataset, rows: tuple[int, ...], batch: int) -> float:
    """Mean loss over all targets of the given rows, in nats per token; the same on every rank and in every layout.

    Args:
        data: sequences of one length S.
        rows: which of them are measured.
        batch: sequences in a global batch.
    """
    mesh, device = booster.plugin.mesh, current_device()
    total = 0.0
    with evaluation_mode(model):
        for start in range(0, len(rows), batch):
            items = [data[row] for row in rows[start : start + batch]]
            share = {k: v.to(device) for k, v in rank_share(items, mesh.rank("dp"), mesh.size("dp")).items()}
            loss = booster.execute_pipeline(iter([share]), model, None, None, return_loss=True)["loss"]
            # Rows have equally many targets, so that a batch weighs as many as it has rows.
            total += float(loss) * len(items)
    return total / len(rows)


def write_sample(
    booster: Booster, model: Any, tokenizer: PreTrainedTokenizerBase, prompt: torch.Tensor, length: int, seed: int
) -> str:
    """Let the model continue a text; the same on every rank, since all draw from the same seed.

    Args:
        model: the boosted model; its ranks generate together.
        prompt: [1, tokens] ids to begin with.
        length: tokens to write at most; prompt and sample together stay within the model's positions.
    """
    torch.manual_seed(seed)
    ids = prompt.to(current_device())
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None:
        length = min(length, positions - ids.shape[1])
    if length > 0:
        ids = booster.generate(
            model,
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            do_sample=True,
            temperature=0.7,
            top_k=50,
            use_cache=model.pipeline is None,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))
