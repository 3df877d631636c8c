"""Sizes of the models that `colonnade train` builds from scratch: one row of numbers each."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from colonnade.errors import ConfigError, explain

# Keyword arguments of transformers' LlamaConfig. The vocabulary comes from the tokenizer, the number of positions from
# the sequence length. Head counts of the small rows divide by 2, 3 and 6: with any of these tensor-parallel sizes ranks get
# equal shares.
PRESETS: dict[str, dict[str, Any]] = {
    "nano": {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "tie_word_embeddings": True,
    },
    "small": {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "tie_word_embeddings": True,
    },
    "medium": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "tie_word_embeddings": True,
    },
    "large": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}


def find_preset(name: str) -> dict[str, Any]:
    """The row of `PRESETS` called `name`.

    Raises:
        ConfigError: for an unknown name, with the nearest known one.
    """
    if name in PRESETS:
        return PRESETS[name]
    near = get_close_matches(name.lower(), PRESETS, n=2, cutoff=0.5)
    rows = [("known", ", ".join(PRESETS))]
    if near:
        rows.append(("try", " or ".join(f"--preset {n}" for n in near)))
    raise ConfigError(explain(f"there is no preset called {name!r}.", rows))


def preset_config(name: str, *, vocab_size: int, positions: int, bos: int | None, eos: int | None, pad: int | None):
    """A LlamaConfig for the preset.

    Args:
        vocab_size: number of rows of the embedding.
        positions: longest sequence in tokens.
        bos, eos, pad: token ids that the tokenizer gives these meanings.
    """
    from transformers import LlamaConfig

    return LlamaConfig(
        **find_preset(name),
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
