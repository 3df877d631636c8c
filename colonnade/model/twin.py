"""A tiny twin of a model: the same structure at a size that trains in seconds.

[Note: what a twin keeps]
Faults of a parallel layout come from structure, not from size: heads that share keys and values, weights that are tied,
biases, norms inside the heads, fused projections, layers that alternate, an odd vocabulary, experts. A twin has all of that.
Only the fields that say how large something is are scaled; every other field is left as it is. Sizes are scaled together,
so that what was equal stays equal and what differed still differs: the ratio of heads to key/value heads, a head width that
is or is not hidden size / heads, low-rank widths, an embedding narrower than the hidden size. Windows become narrow enough
to cut off something in a short sequence, and layers are chosen so that one of each kind is there, and a second one where
layers share weights. Parts of a model with configurations of their own hand over hidden states as wide as they are to be.
Dropout is off, as two runs are to be compared.

Which fields hold which kind of size is in `config_fields`; no rule asks what family a configuration is of.
"""

from __future__ import annotations

from dataclasses import fields as declared_fields
from typing import TYPE_CHECKING, Any

import torch

from colonnade.model.config_fields import (
    HALF_HIDDEN_ELSEWHERE,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    HIDDEN_ELSEWHERE,
    LAYERS,
    Fields,
    is_number,
)
from colonnade.model.twin_layers import MAX_LAYERS, MIN_LAYERS, shrink_layers
from colonnade.model.twin_sizes import (
    VOCAB,
    WINDOW,
    Scale,
    scale_of,
    shrink_counts,
    shrink_layer_widths,
    shrink_widths,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["MAX_LAYERS", "MIN_LAYERS", "VOCAB", "WINDOW", "build", "model_class", "shrink", "twin_model", "with_noise"]

NOISE = 0.15


def shrink(config: PretrainedConfig, multiple: int = 2, layers: int = MIN_LAYERS) -> PretrainedConfig:
    """The configuration of a tiny twin; see [Note: what a twin keeps]. The given one is left alone.

    Configurations inside it (text_config, vision_config) are scaled each by itself, and then fitted to one another.

    Args:
        config: a transformers configuration of any family.
        multiple: counts of heads and widths that this divides, it still divides in the twin; those it does not divide,
            it still does not; and counts of key/value heads below it stay below. The number of tensor-parallel ranks
            the twin is for.
        layers: the twin has so many at least, where the configuration has.
    """
    return _shrink(config, multiple, layers)


def _shrink(
    config: PretrainedConfig, multiple: int, layers: int, outer: Scale | None = None, narrowest: int | None = None
) -> PretrainedConfig:
    """As `shrink`.

    Args:
        outer: the scale of the configuration around it, which is its own where it has no heads (attn_config, ffn_config).
        narrowest: see `scale_of`.
    """
    fields, before = Fields(config), Fields(config)
    parts = {name: part for name, part in vars(config).items() if hasattr(part, "to_dict") and name in fields}
    shrink_layers(fields, layers)
    scale = scale_of(fields, multiple, narrowest)
    if scale is None or (outer is not None and not fields.numbers(HEADS)):
        scale = outer
    if scale is not None:
        shrink_layer_widths(fields, scale)
        shrink_widths(fields, scale)
    shrink_counts(fields, multiple)
    for name in fields:
        if isinstance(fields[name], float) and ("drop" in name or "jitter" in name):
            fields[name] = 0.0
    narrow = _narrowest(parts)
    for name, part in parts.items():
        fields[name] = _shrink(part, multiple, layers, scale, narrow).to_dict()
    _fit_parts(fields, config, parts)
    return _rebuild(config, fields, before)


def _narrowest(parts: dict[str, Any]) -> int | None:
    """Width of the narrowest heads of parts that hand their hidden states to one another; None where none do."""
    own = [Fields(part) for part in parts.values()]
    hidden = {fields.number(HIDDEN) for fields in own}
    if not any(fields[name] in hidden for fields in own for name in fields.numbers(HIDDEN_ELSEWHERE)):
        return None
    return min(
        fields.number(HEAD_DIM) or (fields.number(HIDDEN) or 0) // (fields.number(HEADS) or 1)
        for fields in own
        if fields.numbers(HEADS)
    )


def _fit_parts(fields: Fields, config: Any, parts: dict[str, Any]) -> None:
    """A width that was the hidden size of another part is that part's new one; so is the hidden size of a part that has
    no layers of its own.
    """
    with_layers = {name for name, part in parts.items() if Fields(part).numbers((*HEADS, *LAYERS))}
    was = {name: Fields(parts[name]).number(HIDDEN) for name in parts if name in with_layers}
    now = {name: next((fields[name][n] for n in HIDDEN if is_number(fields[name].get(n))), None) for name in was}

    def new_width(width: int, owner: str | None) -> int | None:
        return next((now[part] for part in was if part != owner and was[part] == width), None)

    for owner, given, made in [(None, config, fields), *((name, part, fields[name]) for name, part in parts.items())]:
        own = Fields(given)
        foreign = HIDDEN_ELSEWHERE if owner in {None, *with_layers} else (*HIDDEN_ELSEWHERE, *HIDDEN)
        for share, names in ((1, foreign), (2, HALF_HIDDEN_ELSEWHERE)):
            for name in own.numbers(names):
                if new := new_width(share * own[name], owner):
                    made[name] = new // share


def _rebuild(config: PretrainedConfig, fields: Fields, before: Fields) -> PretrainedConfig:
    """A configuration of the same class. What the class works out from the fields it declares, it works out anew."""
    from transformers import PretrainedConfig

    kind: Any = type(config)
    declared = {field.name for field in declared_fields(kind)}
    extra = [name for name in fields if name not in declared and fields[name] == before.get(name)]
    if extra and len(declared) > len(declared_fields(PretrainedConfig)):  # else it only has an __init__ of its own
        worked_out = Fields(kind.from_dict({name: before[name] for name in before if name in declared}))
        for name in extra:
            if name in worked_out and worked_out[name] == before[name]:
                del fields[name]
    return kind.from_dict(dict(fields))


def model_class(config: PretrainedConfig) -> Any:
    """The transformers class that trains a model of this configuration.

    The one that its `architectures` name where transformers has it; else the causal language model of the family, and
    for encoders and encoder-decoders their own; for a family without a language model what classifies pictures, writes
    about them or masks them, and at last the model without a head.

    Raises:
        ValueError: transformers has none.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for name in config.architectures or ():
        if isinstance(getattr(transformers, name, None), type):
            return getattr(transformers, name)
    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_MASKED_LM_MAPPING
    pairs = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder:
        mappings = [pairs, causal, masked]
    elif getattr(config, "is_decoder", False):
        mappings = [causal, masked]
    else:  # an encoder may be used as a decoder too, but was made for masked tokens
        mappings = [masked, causal]
    mappings += [
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        auto.MODEL_FOR_MASK_GENERATION_MAPPING,
        auto.MODEL_MAPPING,
    ]
    for mapping in mappings:
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(f"transformers has no model for {type(config).__name__}")


def build(config: PretrainedConfig) -> PreTrainedModel:
    """A model of this configuration in float32, with fresh weights; on the meta device under `torch.device("meta")`."""
    kind = model_class(config)
    if not isinstance(config, kind.config_class):  # a language model inside a larger configuration
        config = next((part for part in vars(config).values() if isinstance(part, kind.config_class)), config)
    return kind._from_config(config, dtype=torch.float32)


def twin_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model whose every parameter matters, in training mode; the same weights at every call.

    A fresh model has biases of 0, norms of 1 and nearly uniform logits, which hide faults; so each entry gets some noise.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(config)
    return with_noise(model, seed)


def with_noise(model: Any, seed: int = 0) -> Any:
    """The model in training mode, with noise on every entry of its parameters: the same at every call."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator))
    model.config.use_cache = False  # a cache of keys and values serves generation only
    return model.train()
