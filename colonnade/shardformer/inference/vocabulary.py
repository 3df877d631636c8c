"""Which modules of a model make up its vocabulary: every table that looks token ids up, every head that yields logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from colonnade.shardformer.description import ModulePolicyDescription
from colonnade.shardformer.words import lm_head, vocab_embedding


def vocabulary_rules(model: nn.Module, gather: bool) -> Iterator[tuple[str, ModulePolicyDescription]]:
    """For each module that is to be dealt out by vocabulary, the path of its parent and what is said of it.

    An encoder–decoder has several tables of one weight, often the head's too. What shares it goes along, as one weight can
    only be split in one way. A head of classes (or of anything but the vocabulary) stays whole.

    Args:
        model: a transformers model; of another nothing is known.
        gather: let the head return whole logits, for a model that computes with them before or instead of the loss.
    """
    embedding, head = named_by(model, "get_input_embeddings"), named_by(model, "get_output_embeddings")
    if not isinstance(embedding, nn.Embedding):
        embedding = None
    if not isinstance(head, nn.Linear) or not _is_vocabulary(model, embedding, head):
        head = None
    weights = [module.weight for module in (embedding, head) if module is not None]
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.Linear)) or not any(module.weight is w for w in weights):
            continue
        parent, _, leaf = path.rpartition(".")
        yield parent, vocab_embedding(leaf) if isinstance(module, nn.Embedding) else lm_head(leaf, gather=gather)


def named_by(model: Any, getter: str) -> Any:
    """What a model itself calls its table of tokens or its head; None where it has none."""
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):  # transformers' own way to say that a model has none
        return None


def _is_vocabulary(model: Any, embedding: nn.Embedding | None, head: nn.Linear) -> bool:
    """Whether a head is over the tokens that the table has, or that the config counts."""
    if embedding is not None and (head.weight is embedding.weight or head.out_features == embedding.num_embeddings):
        return True
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    return head.out_features in (getattr(config, "vocab_size", None), getattr(text, "vocab_size", None))
