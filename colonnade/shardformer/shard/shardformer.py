"""ShardFormer: the entry to sharding without a plugin."""

from __future__ import annotations

from torch import nn

from colonnade.shardformer.layer.loss import LossAverage
from colonnade.shardformer.policy import Policy, WholePolicy
from colonnade.shardformer.registry import find_policy
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
        self, model: nn.Module, policy: Policy | None = None, average: LossAverage | None = None
    ) -> tuple[nn.Module, list[dict[str, nn.Parameter]]]:
        """Shard a model in place.

        Args:
            policy: what to do with it; by default the one for its family, or none where there is nothing to do
                (one rank, native norms), so that any module will do.
            average: where the loss function learns over which data-parallel ranks to average; plugins give it.

        Returns:
            The model, and the groups of names that are one parameter (tied weights).

        Raises:
            PolicyError, ConfigError: before anything has been changed.
        """
        if policy is None:
            config = self.shard_config
            nothing_to_do = config.tensor_parallel_size == 1 and not config.enable_fused_normalization
            policy = WholePolicy() if nothing_to_do else find_policy(model)
        sharder = ModelSharder(model, policy, self.shard_config, average)
        shared = sharder.shard()
        if self.shard_config.enable_flash_attention:
            choose_attention(sharder.model)
        return sharder.model, shared


def choose_attention(model: nn.Module) -> None:
    """Use the flash-attention package where it is installed and can run, else torch's own fused attention."""
    choose = getattr(model, "set_attn_implementation", None)
    if choose is None:
        return
    from transformers.utils import is_flash_attn_2_available

    param = next(model.parameters())
    fits = param.device.type == "cuda" and param.element_size() == 2 and is_flash_attn_2_available()
    choose("flash_attention_2" if fits else "sdpa")
