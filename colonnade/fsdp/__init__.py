"""Fully sharded data parallelism over torch's FSDP2: parameters, gradients and states cut over the data-parallel ranks.

[Note: what a rank holds]
`fully_shard` cuts every parameter along its first dim in chunks of ceil(rows / ranks); the last ranks may get fewer rows
or none, and their chunk is padded in the buffers that travel. A layout on each parameter says which rows these are, so
that the gradient norm, the checkpoint and the parity check need not know of FSDP.

[Note: units]
A unit is gathered as a whole before its forward and again before its backward, and its gradients are reduced together.
Each repeated block is a unit, and the model itself is one with what is left: embedding, norm, head. A rank that did not
call a unit which others call would leave them waiting, so every rank has to call the same blocks in the same order.
"""

from colonnade.fsdp.gradients import ShardedGradients
from colonnade.fsdp.shard import Sharding, ShardOptions, check_shardable, shard_model
from colonnade.fsdp.stepped import LocalShards
from colonnade.fsdp.units import find_units

__all__ = [
    "LocalShards",
    "ShardOptions",
    "ShardedGradients",
    "Sharding",
    "check_shardable",
    "find_units",
    "shard_model",
]
