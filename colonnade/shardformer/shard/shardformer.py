"""ShardFormer: the entry to sharding without a plugin."""

from __future__ import annotations

from torch import nn

from colonnade.shardformer.inference import infer_policy
from colonnade.shardformer.layer.loss import LossAverage
from colonnade.shardformer.policy import Policy, WholePolicy
from colonnade.shardformer.registry import find_policy, has_policy
from colonnade.shardformer.shard.shard_config import ShardConfig
from colonnade.shardformer.shard.sharder import ModelSharder


class ShardFormer:
    """Turns an unmodified model into its tensor-parallel form.

    Args:
        shard_config: how to split it.

    Example:
        model, shared = ShardFormer(ShardConfig(tensor_parallel_process_group=group)).optimize(model)
    """

    def __init__(self, shard_config: ShardConfig) -> None:
        self.shard_config = shard_config

    def optimize(
        self, model: nn.Module, policy: Policy | None = None
    ) -> tuple[nn.Module, list[dict[str, nn.Parameter]]]:
        """Shard a model in place.

        Args:
            policy: what to do with it. By default the one written for its family, else one that is inferred from the
                model; none where there is nothing to do (one rank, native norms), so that any module will do.

        Returns:
            The model, and the groups of names that are one parameter (tied weights).

        Raises:
            PolicyError, ConfigError: before anything has been changed.
        """
        sharder = self.prepare(model, policy)
        sharder.warn()
        shared = sharder.shard()
        return sharder.model, shared

    def prepare(
        self, model: nn.Module, policy: Policy | None = None, average: LossAverage | None = None
    ) -> ModelSharder:
        """Everything of `optimize` up to the first change or communication; the rest is the sharder's `shard()`.

        Args:
            average: where the loss function learns over which data-parallel ranks to average; plugins give it.
        """
        sharder = ModelSharder(model, policy or self._choose(model), self.shard_config, average)
        sharder.prepare()
        return sharder

    def _choose(self, model: nn.Module) -> Policy:
        """The policy for a model for which none was given."""
        config = self.shard_config
        if config.tensor_parallel_size == 1 and not config.enable_fused_normalization:
            return WholePolicy()
        if has_policy(model):
            return find_policy(model)  # which refuses where there is none
        return infer_policy(model, config.axis, config.check_inferred_policy)
