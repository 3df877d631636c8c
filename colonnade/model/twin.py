"""A tiny twin of a model: the same structure at a size that trains in seconds.

[Note: what a twin keeps]
Faults of a parallel layout come from structure, not from size: heads that share keys and values, weights that are tied,
biases, norms inside the heads, fused projections, layers that alternate, an odd vocabulary, experts. A twin has all of that.
Only the fields that say how large something is are scaled; every other field is left as it is. Sizes are scaled together,
so that what was equal stays equal and what differed still differs: the ratio of heads to key/value heads, a head width that
is or is not hidden size / heads, low-rank widths, an embedding narrower than the hidden size. Windows become narrow enough
to cut off something in a short sequence, and layers are chosen so that one of each kind is there. Dropout is off, as two
runs are to be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

NOISE = 0.15
VOCAB = 67  # no two ranks can share it out evenly
POSITIONS = 64
WINDOW = 8  # narrower than the sequences that a twin is fed
MAX_RATIO = 8  # of query heads to key/value heads; larger ones are reduced
MAX_LAYERS = 8

# Names under which configurations keep the same thing, where their attribute_map does not say it.
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads",
         "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
         "swa_num_attention_heads")  # fmt: skip
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups")
HEAD_DIM = ("head_dim", "d_kv", "kv_channels", "attention_head_dim", "attention_head_size", "swa_head_dim", "d_head")
HIDDEN = ("hidden_size", "n_embd", "d_model", "embedding_dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
          "num_encoder_layers", "num_decoder_layers", "num_blocks")  # fmt: skip
# widths of the residual stream's kind, scaled as it is
LIKE_HIDDEN = ("word_embed_proj_dim", "embedding_size", "lru_width", "attention_hidden_size", "input_embedding_size",
               "output_embedding_size", "emb_dim")  # fmt: skip
# widths inside the blocks, scaled as the hidden size and rounded
INNER = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "d_inner", "dff", "dim_ff", "ffn_hidden_size",
         "encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp", "moe_intermediate_size", "dense_intermediate_size",
         "shared_expert_intermediate_size", "shared_experts_intermediate_size", "shared_intermediate_size",
         "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "feed_forward_size", "q_lora_rank",
         "kv_lora_rank", "o_lora_rank", "laurel_rank", "hidden_size_per_layer_input", "mamba_d_ssm")  # fmt: skip
# widths of a head, scaled as the head width; even, as rotary positions turn pairs
LIKE_HEAD_DIM = ("rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim", "v_head_dim", "index_head_dim",
                 "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim")  # fmt: skip
# counts of heads of another kind than attention's, scaled as those
LIKE_HEADS = ("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "index_n_heads")
STATES = ("mamba_d_state", "state_size", "ssm_state_size")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")
GROUPS = ("n_group", "num_expert_group")
CHOSEN_GROUPS = ("topk_group",)
WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_chunk_size", "local_attention",
           "attention_window_size", "index_topk")  # fmt: skip
POSITION_TABLES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions",
                   "max_source_positions")  # fmt: skip
VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "decoder_vocab_size")
# lists with an entry for each layer; lists of layer numbers; counts of leading layers that differ; every n-th differs
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "attention_layers", "attn_layers",
             "layer_rope_theta", "indexer_types", "num_attention_heads_per_layer",
             "activation_sparsity_pattern")  # fmt: skip
LAYER_NUMBERS = ("moe_layers", "mlp_only_layers", "full_attn_idxs")
LEADING = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
PERIODS = ("decoder_sparse_step", "expert_layer_period", "attn_layer_period", "interleave_moe_layer_step",
           "full_attention_interval", "global_attn_every_n_layers", "no_rope_layer_interval",
           "sliding_window_pattern", "layer_group_size", "moe_layer_freq")  # fmt: skip


@dataclass(frozen=True)
class _Scale:
    """The attention of a model and of its twin; every other width follows from it."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    new_hidden: int
    new_heads: int
    new_kv_heads: int
    new_head_dim: int
    multiple: int

    def width(self, size: int) -> int:
        """A width of the residual stream's kind."""
        return self.new_hidden if size == self.hidden else self._rounded(size * self.new_hidden / self.hidden)

    def inner(self, size: int) -> int:
        """A width inside the blocks: between 8 entries and 4 times the hidden size."""
        scaled = min(size * self.new_hidden / self.hidden, 4 * self.new_hidden)
        return self._rounded(scaled)

    def head_width(self, size: int) -> int:
        """A width inside a head: even, at least 2."""
        return max(2, 2 * round(size * self.new_head_dim / self.head_dim / 2))

    def _rounded(self, size: float) -> int:
        unit = math.lcm(8, 2 * self.multiple)
        return max(unit, unit * round(size / unit))


def shrink(config: PretrainedConfig, multiple: int = 2) -> PretrainedConfig:
    """The configuration of a tiny twin; see [Note: what a twin keeps]. The given one is left alone.

    Configurations inside it (text_config, vision_config) are scaled each by itself.

    Args:
        config: a transformers configuration of any family.
        multiple: counts of heads and widths that this divides, it still divides in the twin; and those it does not
            divide, it still does not. The number of tensor-parallel ranks the twin is for.
    """
    fields = config.to_dict()
    inner = {key: value for key, value in vars(config).items() if hasattr(value, "to_dict") and key in fields}
    for key, value in inner.items():
        fields[key] = shrink(value, multiple).to_dict()
    native = dict(config.attribute_map or {})

    def present(names: Iterable[str]) -> list[str]:
        """The native names of those that the configuration has."""
        return [name for name in dict.fromkeys(native.get(n, n) for n in names) if _is_number(fields.get(name))]

    _shrink_layers(fields, present)
    scale = _scale_of(fields, present, multiple)
    if scale is not None:
        _shrink_widths(fields, present, scale)
    _shrink_rest(fields, present, multiple)
    for name in fields:
        if isinstance(fields[name], float) and ("drop" in name or "jitter" in name):
            fields[name] = 0.0
    return type(config).from_dict(fields)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _scale_of(fields: dict[str, Any], present: Any, multiple: int) -> _Scale | None:
    hidden_names, head_names = present(HIDDEN), present(HEADS)
    if not hidden_names or not head_names:
        return None
    hidden, heads = fields[hidden_names[0]], fields[head_names[0]]
    kv_names, dim_names = present(KV_HEADS), present(HEAD_DIM)
    kv_heads = fields[kv_names[0]] if kv_names else heads
    head_dim = fields[dim_names[0]] if dim_names else hidden // heads
    new_kv, new_heads = _head_counts(kv_heads, heads, multiple)
    new_dim = 16 if new_heads <= 8 else 8
    new_hidden = new_heads * new_dim
    if heads * head_dim != hidden:  # the projections then are not square, and stay so
        wanted = new_hidden * hidden / (heads * head_dim)
        step = math.lcm(8, new_heads)  # most configurations want heads to divide the hidden size
        scaled = max(step, step * round(wanted / step))
        new_hidden = scaled if scaled != new_hidden else new_hidden + step
    return _Scale(hidden, heads, kv_heads, head_dim, new_hidden, new_heads, new_kv, new_dim, multiple)


def _head_counts(kv_heads: int, heads: int, multiple: int) -> tuple[int, int]:
    """Key/value heads and heads of the twin."""
    if heads % kv_heads:  # no grouping that could be kept
        return _count(kv_heads, multiple, 2), _count(heads, multiple, 4)
    if kv_heads == heads:
        count = _count(heads, multiple, 4)
        return count, count
    new_kv = _count(kv_heads, multiple, 2)
    ratio = heads // kv_heads
    if ratio > MAX_RATIO:
        ratio = _count(ratio, multiple, MAX_RATIO // 2)
    return new_kv, new_kv * ratio


def _count(count: int, multiple: int, about: int) -> int:
    """A small count, about as large as said, that has the same common divisor with `multiple`; one stays one."""
    divisor = math.gcd(count, multiple)
    small = divisor if count > 1 else 1
    while small < min(count, about) or (small == 1 < count):
        small += divisor
        while math.gcd(small, multiple) != divisor:
            small += divisor
    return min(small, count)


def _shrink_widths(fields: dict[str, Any], present: Any, scale: _Scale) -> None:
    new: dict[str, int] = {}
    new |= dict.fromkeys(present(HIDDEN), scale.new_hidden)
    new |= dict.fromkeys(present(HEADS), scale.new_heads)
    new |= dict.fromkeys(present(KV_HEADS), scale.new_kv_heads)
    new |= dict.fromkeys(present(HEAD_DIM), scale.new_head_dim)
    new |= {name: scale.width(fields[name]) for name in present(LIKE_HIDDEN)}
    new |= {name: scale.inner(fields[name]) for name in present(INNER)}
    new |= {name: scale.head_width(fields[name]) for name in present(LIKE_HEAD_DIM)}
    for name in present(LIKE_HEADS):
        new[name] = _count(fields[name], scale.multiple, 4 if fields[name] >= scale.heads else 2)
    if {"qk_rope_head_dim", "qk_nope_head_dim"} <= new.keys():  # multi-head latent attention
        if "qk_head_dim" in new:
            new["qk_head_dim"] = new["qk_rope_head_dim"] + new["qk_nope_head_dim"]
        if "head_dim" in new:  # what rotary positions turn
            whole = fields["qk_rope_head_dim"] == fields["head_dim"]
            new["head_dim"] = new["qk_rope_head_dim"] if whole else scale.new_head_dim
    fields |= new
    per_layer = fields.get("intermediate_size")
    if isinstance(per_layer, list):
        fields["intermediate_size"] = [scale.inner(size) for size in per_layer]
    _shrink_state_space(fields, scale)
    _shrink_rotary(fields, new.get("head_dim", scale.new_head_dim))


def _shrink_state_space(fields: dict[str, Any], scale: _Scale) -> None:
    """Heads of Mamba blocks, which share out a multiple of the hidden size or a width of their own."""
    for name in STATES:
        if _is_number(fields.get(name)):
            fields[name] = min(16, fields[name])
    if _is_number(fields.get("mamba_num_heads")) and _is_number(fields.get("mamba_head_dim")):
        fields |= {"mamba_num_heads": scale.new_heads, "mamba_head_dim": scale.new_head_dim}
    if _is_number(fields.get("mamba_n_heads")) and _is_number(fields.get("mamba_expand")):
        own: Any = fields.get("mamba_d_ssm")
        whole = own if _is_number(own) else fields["mamba_expand"] * scale.new_hidden
        fields |= {"mamba_n_heads": scale.new_heads, "mamba_d_head": whole // scale.new_heads}


def _shrink_rotary(fields: dict[str, Any], head_dim: int) -> None:
    """Rotary tables that a configuration spells out: one factor for each pair of a head, or parts that add up to them."""
    rotary = fields.get("rope_parameters")
    if not isinstance(rotary, dict):
        return
    for parameters in [rotary, *(value for value in rotary.values() if isinstance(value, dict))]:
        share = parameters.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
        pairs = int(head_dim * share) // 2
        for name in ("short_factor", "long_factor"):
            factors = parameters.get(name)
            if isinstance(factors, list) and factors:
                parameters[name] = [factors[i * len(factors) // pairs] for i in range(pairs)]
        sections = parameters.get("mrope_section")
        if isinstance(sections, list) and sum(sections):
            scaled = [max(1, section * pairs // sum(sections)) for section in sections]
            parameters["mrope_section"] = [*scaled[:-1], pairs - sum(scaled[:-1])]


def _shrink_layers(fields: dict[str, Any], present: Any) -> None:
    """Few layers, at least one of each kind, in their order."""
    spelled = fields.get("attention_types")
    if isinstance(spelled, list):  # GPT-Neo: kinds and how often they repeat
        fields["attention_types"] = [[kinds, 1] for kinds, _ in spelled]
        fields.pop("attention_layers", None)
        fields |= dict.fromkeys(present(LAYERS), sum(len(kinds) for kinds, _ in spelled))
        return
    names = present(LAYERS)
    count = fields[names[0]] if names else 0
    if count < 2:
        return
    lists = [name for name in (*PER_LAYER, "intermediate_size") if _has_length(fields.get(name), count)]
    numbers = [name for name in LAYER_NUMBERS if isinstance(fields.get(name), list)]
    leading = [name for name in LEADING if _is_number(fields.get(name))]
    own = {int(layer): overrides for layer, overrides in (fields.get("per_layer_config") or {}).items()}
    # where the kinds are spelled out, the interval they were made from says nothing more
    periods = [] if lists else [fields[name] for name in PERIODS if _is_number(fields.get(name))]
    periods += [fields[name] for name in ("decoder_sparse_step", "expert_layer_period") if lists and fields.get(name)]

    def kind(layer: int) -> tuple:
        spelled_out = [repr(fields[name][layer]) for name in lists if name != "layer_rope_theta"]
        counted = [*(layer in fields[n] for n in numbers), *(layer < fields[n] for n in leading)]
        return (*spelled_out, *counted, repr(own.get(layer)))

    chosen = _one_of_each([kind(layer) for layer in range(count)])
    if (period := max(periods, default=1)) > 1:
        chosen = list(range(min(count, MAX_LAYERS, max(period, 1 + max(chosen)))))
    for name in lists:
        fields[name] = [fields[name][layer] for layer in chosen]
    for name in numbers:
        fields[name] = [new for new, layer in enumerate(chosen) if layer in fields[name]]
    for name in leading:
        fields[name] = sum(layer < fields[name] for layer in chosen)
    if own:
        fields["per_layer_config"] = {new: own[layer] for new, layer in enumerate(chosen) if layer in own}
    fields |= {name: min(len(chosen), fields[name]) for name in names}
    if _is_number(fields.get("max_window_layers")):
        fields["max_window_layers"] = min(len(chosen), fields["max_window_layers"])


def _has_length(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count


def _one_of_each(kinds: list[tuple]) -> list[int]:
    """The first layer of each kind, and a second layer where all are alike."""
    first = {kind: layer for layer, kind in reversed(list(enumerate(kinds)))}
    chosen = sorted(first.values())
    return chosen if len(chosen) > 1 else [chosen[0], *[i for i in range(len(kinds)) if i != chosen[0]][:1]]


def _shrink_rest(fields: dict[str, Any], present: Any, multiple: int) -> None:
    experts, chosen = present(EXPERTS), present(CHOSEN)
    for name in chosen:
        fields[name] = min(2, fields[name])
    groups = [name for name in present(GROUPS) if fields[name] > 1]
    for name in experts:
        if fields[name] > 1:  # two in each group, so that a group can be scored by its best two
            fields[name] = max(_count(fields[name], multiple, 4), 4 if groups else 1)
    for name in groups:
        fields[name] = 2
    for name in present(CHOSEN_GROUPS):
        fields[name] = min(1 if groups else fields[name], fields[name])
    fields |= {name: min(WINDOW, fields[name]) for name in present(WINDOWS)}
    if not isinstance(fields.get("rope_parameters"), dict):  # rotary scaling counts in positions; a table costs memory
        fields |= {name: min(POSITIONS, fields[name]) for name in present(POSITION_TABLES)}
    fields |= dict.fromkeys(present(VOCABULARIES), VOCAB)
    _shrink_ids(fields)


def _shrink_ids(fields: dict[str, Any]) -> None:
    """Token ids have to lie in the small vocabulary, and those that differed still differ."""
    names = [n for n in fields if n.endswith(("token_id", "token_index")) and isinstance(fields[n], (int, list))]
    ids = {value for n in names for value in (fields[n] if isinstance(fields[n], list) else [fields[n]])}
    free = iter(i for i in range(VOCAB - 1, -1, -1) if i not in ids)
    small = {value: value if 0 <= value < VOCAB else next(free) for value in sorted(ids, key=str) if _is_number(value)}
    for name in names:
        value = fields[name]
        fields[name] = [small.get(v, v) for v in value] if isinstance(value, list) else small.get(value, value)


def model_class(config: PretrainedConfig) -> Any:
    """The transformers class that trains a model of this configuration.

    The one that its `architectures` name where transformers has it; else the causal language model of the family, and
    for encoders and encoder-decoders their own.

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
    for mapping in mappings:
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(f"transformers has no language model for {type(config).__name__}")


def build(config: PretrainedConfig) -> PreTrainedModel:
    """A model of this configuration in float32, with fresh weights; on the meta device under `torch.device("meta")`."""
    kind = model_class(config)
    text = config.get_text_config()
    if isinstance(text, kind.config_class):  # a language model inside a larger configuration
        config = text
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
