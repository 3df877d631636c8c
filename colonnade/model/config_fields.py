"""The names under which the configurations of transformers keep sizes, by what kind of size it is.

An attribute_map says where a configuration keeps a common field under another name; these tables say the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads",
         "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
         "swa_num_attention_heads")  # fmt: skip
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups", "kv_n_heads")
HEADS_PER_LAYER = ("num_attention_heads_per_layer",)
HEAD_DIM = ("head_dim", "d_kv", "kv_channels", "attention_head_dim", "attention_head_size", "swa_head_dim", "d_head")
HIDDEN = ("hidden_size", "n_embd", "d_model", "embedding_dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
          "num_encoder_layers", "num_decoder_layers", "num_blocks", "depth", "num_layers_per_stack")  # fmt: skip
# widths of the residual stream's kind, scaled as it is
LIKE_HIDDEN = ("word_embed_proj_dim", "embedding_size", "lru_width", "attention_hidden_size", "input_embedding_size",
               "output_embedding_size", "emb_dim", "adapter_in_dim", "adapter_input_size", "backbone_hidden_size",
               "ple_embed_dim", "pronunciation_embed_dim", "shape_embed_dim")  # fmt: skip
# widths of the residual stream of another part of the model, which has a configuration of its own
HIDDEN_ELSEWHERE = ("hidden_size_global", "adapter_out_dim", "out_hidden_size", "projector_output_dim",
                    "text_hidden_size", "cross_attention_hidden_size", "encoder_hidden_size", "output_channels")  # fmt: skip
HALF_HIDDEN_ELSEWHERE = ("num_pos_feats",)
# lists of widths that add up to the hidden size
PARTS_OF_HIDDEN = ("axial_pos_embds_dim",)
# widths inside the blocks, scaled as the hidden size and rounded
INNER = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "d_inner", "dff", "dim_ff", "ffn_hidden_size",
         "encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp", "moe_intermediate_size", "dense_intermediate_size",
         "shared_expert_intermediate_size", "shared_experts_intermediate_size", "shared_intermediate_size",
         "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "feed_forward_size", "q_lora_rank",
         "kv_lora_rank", "o_lora_rank", "laurel_rank", "hidden_size_per_layer_input", "mamba_d_ssm", "mamba_dt_rank",
         "time_step_rank", "adapter_rank", "hc_lowrank", "loop_gate_rank", "gated_norm_rank")  # fmt: skip
# widths of a head, scaled as the head width; even, as rotary positions turn pairs
LIKE_HEAD_DIM = ("rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim", "v_head_dim", "index_head_dim",
                 "indexer_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim")  # fmt: skip
# counts of heads of another kind than attention's; (shared heads, heads that share them)
LIKE_HEADS = ("linear_num_heads", "index_n_heads", "indexer_n_heads")
HEAD_PAIRS = (("linear_num_key_heads", "linear_num_value_heads"),)
# heads of state-space blocks: counts, widths, groups that share their state projections, and widths of all heads
MAMBA_HEADS = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
MAMBA_HEAD_DIM = ("mamba_head_dim", "mamba_d_head", "mamba_headdim")
MAMBA_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
MAMBA_EXPAND = ("mamba_expand", "expand")
STATES = ("mamba_d_state", "state_size", "ssm_state_size")
CHUNKS = ("mamba_chunk_size", "chunk_size")  # steps that are taken at once; the second name has other uses elsewhere
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")
GROUPS = ("n_group", "num_expert_group")
CHOSEN_GROUPS = ("topk_group",)
WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_chunk_size", "local_attention",
           "attention_window_size", "index_topk", "indexer_budget", "local_attention_window_len",
           "keep_window_size")  # fmt: skip
POSITION_TABLES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions",
                   "max_source_positions")  # fmt: skip
# lists of sizes whose product is the number of positions
POSITION_GRIDS = ("axial_pos_shape",)
VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "decoder_vocab_size",
                "encoder_hash_byte_group_vocab", "ngram_vocab_size_base", "pronunciation_vocab_size",
                "shape_vocab_size")  # fmt: skip
# lists with an entry for each layer; lists of layer numbers, from 0 and from 1
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "attention_layers", "attn_layers",
             "layer_rope_theta", "indexer_types", "activation_sparsity_pattern", *HEADS_PER_LAYER)  # fmt: skip
LAYER_NUMBERS = ("moe_layers", "mlp_only_layers", "full_attn_idxs", "hybrid_layer_ids", "cross_attention_layers",
                 "global_attn_indexes")  # fmt: skip
LAYER_NUMBERS_FROM_ONE = ("ple_layer_ids",)
# counts of leading and of trailing layers that differ; the last layer that differs, by its number; counts of stretches
# that follow one another; stretches of equal length; every n-th differs
LEADING = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "loop_layer_index_start",
           "loop_layer_index_end")  # fmt: skip
TRAILING = ("num_kv_shared_layers",)
LAST = ("moe_layer_end_index",)
STRETCHES = (("n_input_layers", "n_recurrent_layers", "n_output_layers"),)
STRETCH_LENGTHS = ("n_layers_per_attn_res_block",)
PERIODS = ("decoder_sparse_step", "expert_layer_period", "attn_layer_period", "interleave_moe_layer_step",
           "full_attention_interval", "global_attn_every_n_layers", "no_rope_layer_interval",
           "sliding_window_pattern", "layer_group_size", "moe_layer_freq")  # fmt: skip
# kinds of layers that use the weights of earlier ones of their kind, and how many of these have weights of their own
SHARED_KINDS, SHARED_WEIGHTS = ("hybrid",), "num_mem_blocks"


class Fields(dict[str, Any]):
    """The fields of a configuration by name, and which of them hold the sizes of a kind.

    Args:
        config: the configuration. Its own attributes are read, as some write themselves out in another form.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config.to_dict())
        for name in self:
            own = vars(config).get(name)
            if is_number(own) or isinstance(own, list):
                self[name] = list(own) if isinstance(own, list) else own
        self.native = dict(config.attribute_map or {})

    def numbers(self, names: Iterable[str]) -> list[str]:
        """The native names of those that hold a number here."""
        natives = dict.fromkeys(self.native.get(name, name) for name in names)
        return [name for name in natives if is_number(self.get(name))]

    def lists(self, names: Iterable[str]) -> list[str]:
        """Those that hold a list with something in it."""
        return [name for name in names if isinstance(self.get(name), list) and self[name]]

    def number(self, names: Iterable[str]) -> int | None:
        """The first number under these names."""
        found = self.numbers(names)
        return self[found[0]] if found else None

    def overriding(self, values: dict[str, Any]) -> Fields:
        """Some fields of one layer, read as this configuration's are."""
        other = self.__new__(type(self))
        other.update(values)
        other.native = self.native
        return other


def is_number(value: Any) -> bool:
    """Whether it is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)
