"""Inputs with which a model can be run to look at it."""

from __future__ import annotations

import inspect
from typing import Any

import torch

ROWS, TOKENS = 2, 12


def probe_inputs(model: Any, device: torch.device, dense_mask: bool = False) -> dict[str, Any]:
    """Inputs of one forward for a transformers model, with labels where it predicts tokens.

    Args:
        dense_mask: give the mask as zeros [rows, 1, tokens, tokens], which models add as it is; the meta device has no
            values from which a mask could be made.
    """
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(5)

    def ids(vocabulary: int) -> torch.Tensor:
        return torch.randint(1, vocabulary, (ROWS, TOKENS), generator=generator).to(device)

    inputs: dict[str, Any] = {}
    if "input_ids" in names:
        inputs["input_ids"] = ids(text.vocab_size)
        if "attention_mask" in names:
            mask = torch.ones(ROWS, TOKENS, dtype=torch.long, device=device)
            inputs["attention_mask"] = torch.zeros(ROWS, 1, TOKENS, TOKENS, device=device) if dense_mask else mask
        if "labels" in names and not dense_mask and model.get_output_embeddings() is not None:
            inputs["labels"] = inputs["input_ids"]
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = ids(text.vocab_size)
    if "pixel_values" in names and "input_ids" not in names:  # one that takes both is run on text alone
        side = getattr(config, "image_size", 32)
        inputs["pixel_values"] = torch.randn(
            ROWS, getattr(config, "num_channels", 3), side, side, generator=generator
        ).to(device)
    if "input_features" in names and hasattr(config, "num_mel_bins"):  # speech: two frames for each source position
        frames = 2 * config.max_source_positions
        inputs["input_features"] = torch.randn(ROWS, config.num_mel_bins, frames, generator=generator).to(device)
    if "use_cache" in names:
        inputs["use_cache"] = False
    return inputs
