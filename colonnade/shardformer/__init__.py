"""ShardFormer: replaces a model's submodules by their parallel forms, from a declarative policy."""

from colonnade.model.spine import Spine
from colonnade.shardformer.description import (
    LocalRatio,
    LocalShare,
    ModulePolicyDescription,
    SubModuleReplacementDescription,
)
from colonnade.shardformer.policy import Policy
from colonnade.shardformer.registry import find_policy, known_families
from colonnade.shardformer.shard.shard_config import ShardConfig
from colonnade.shardformer.shard.sharder import ModelSharder
from colonnade.shardformer.shard.shardformer import ShardFormer
from colonnade.shardformer.words import (
    col,
    dropout,
    head_norm,
    lm_head,
    method,
    norm,
    ratio,
    replicate,
    row,
    shrink,
    split_norm,
    vocab_embedding,
)

__all__ = [
    "LocalRatio",
    "LocalShare",
    "ModelSharder",
    "ModulePolicyDescription",
    "Policy",
    "ShardConfig",
    "ShardFormer",
    "Spine",
    "SubModuleReplacementDescription",
    "col",
    "dropout",
    "find_policy",
    "head_norm",
    "known_families",
    "lm_head",
    "method",
    "norm",
    "ratio",
    "replicate",
    "row",
    "shrink",
    "split_norm",
    "vocab_embedding",
]
