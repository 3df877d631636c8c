"""Parallel layers. Each stands in for a native one through `from_native_module` and can be used alone."""

from colonnade.shardformer.layer.cross_entropy import cross_entropy_1d
from colonnade.shardformer.layer.dropout import DropoutForParallelInput, DropoutForReplicatedInput
from colonnade.shardformer.layer.embedding import Embedding1D, VocabParallelEmbedding1D
from colonnade.shardformer.layer.fused_linear import Conv1D_Col, Conv1D_Row, FusedLinear1D_Col, FusedLinearConv1D_Col
from colonnade.shardformer.layer.head import VocabParallelLMHead1D
from colonnade.shardformer.layer.linear import Linear1D_Col, Linear1D_Row
from colonnade.shardformer.layer.norm import FusedLayerNorm, FusedRMSNorm
from colonnade.shardformer.layer.region import Region
from colonnade.shardformer.layer.sharded_norm import ShardedLayerNorm, ShardedNorm, ShardedRMSNorm

__all__ = [
    "Conv1D_Col",
    "Conv1D_Row",
    "DropoutForParallelInput",
    "DropoutForReplicatedInput",
    "Embedding1D",
    "FusedLayerNorm",
    "FusedLinear1D_Col",
    "FusedLinearConv1D_Col",
    "FusedRMSNorm",
    "Linear1D_Col",
    "Linear1D_Row",
    "Region",
    "ShardedLayerNorm",
    "ShardedNorm",
    "ShardedRMSNorm",
    "VocabParallelEmbedding1D",
    "VocabParallelLMHead1D",
    "cross_entropy_1d",
]
