"""HybridParallelPlugin: tensor parallelism within groups of ranks, data parallelism over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from colonnade.booster.plugin.plugin_base import Boosted, DPPluginBase, check_boostable, pristine_config
from colonnade.booster.plugin.start import start_alike
from colonnade.cluster.device import current_device
from colonnade.cluster.mesh import ParallelMesh
from colonnade.comm.reducer import GradientReducer
from colonnade.errors import ConfigError, explain
from colonnade.precision.optimizer import ParallelOptimizer
from colonnade.precision.precision import cast_parameters
from colonnade.shardformer import Policy, ShardConfig, ShardFormer
from colonnade.shardformer.layer.loss import LossAverage


class HybridParallelPlugin(DPPluginBase):
    """Splits a model over `tp_size` ranks by a ShardFormer policy, and the batch over the groups of such ranks.

    Consecutive ranks form a tensor-parallel group; the number of groups is the world size / tp_size.

    Args:
        tp_size: ranks that share one model.
        pp_size, sp_size, zero_stage, sequence_parallelism_mode: not available in this version; leave them as they are.
        precision: "bf16" (parameters and activations in bf16, optimizer on float32 master weights) or "fp32".
        max_norm: gradients are clipped to this global norm; 0 leaves them.
        enable_fused_normalization: replace norms by one fused operator each.
        enable_flash_attention: choose the fastest attention implementation that is installed.
        num_microbatches, microbatch_size: how `execute_pipeline` cuts a batch; by default not at all.
        custom_policy: sharding policy, or its class, to use instead of the model family's own.
        bucket_bytes: size of the buckets in which gradients are averaged over data-parallel ranks.
        check_batches: at every forward check that the ranks of a tensor-parallel group got the same batch (debugging).

    Raises:
        ConfigError: on every rank alike, for sizes that do not fit the number of ranks and options that do not exist.
    """

    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        sp_size: int = 1,
        *,
        zero_stage: int = 0,
        precision: str = "bf16",
        max_norm: float = 0.0,
        sequence_parallelism_mode: str | None = None,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        custom_policy: Policy | type[Policy] | None = None,
        bucket_bytes: int = 8 << 20,
        check_batches: bool = False,
    ) -> None:
        _refuse_what_is_missing(pp_size, sp_size, zero_stage, sequence_parallelism_mode)
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes={bucket_bytes!r} must be a whole number of at least 1.")
        mesh = ParallelMesh(tp=tp_size, pp=pp_size, sp=sp_size)
        super().__init__(mesh, precision, max_norm, microbatch_size, num_microbatches, check_batches)
        self.custom_policy = custom_policy() if isinstance(custom_policy, type) else custom_policy
        self.bucket_bytes = bucket_bytes
        self.shard_config = ShardConfig(
            tensor_parallel_process_group=mesh.axis("tp"),
            enable_tensor_parallelism=tp_size > 1,
            enable_fused_normalization=enable_fused_normalization,
            enable_flash_attention=enable_flash_attention,
        )

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        check_boostable(model, optimizer)
        config, average = pristine_config(model), LossAverage()
        sharder = ShardFormer(self.shard_config).prepare(model, self.custom_policy, average)
        sharder.warn()
        start_alike(sharder.model, self.mesh)
        sharder.shard()
        model = sharder.model.to(current_device())
        parallel_optimizer = None
        if optimizer is not None:
            # made before the cast, so that the master weights are the weights as given
            parallel_optimizer = ParallelOptimizer(optimizer, self.mesh, self.dtype, self.max_norm)
        cast_parameters(model, self.dtype)
        if parallel_optimizer is not None:
            parallel_optimizer.reducer = GradientReducer(model.parameters(), self.mesh.axis("dp"), self.bucket_bytes)
        return (
            self.wrap(model, average, parallel_optimizer, config),
            parallel_optimizer,
            criterion,
            dataloader,
            lr_scheduler,
        )

    def __repr__(self) -> str:
        return f"HybridParallelPlugin({self.mesh!r}, {self.precision})"


def _refuse_what_is_missing(pp_size: int, sp_size: int, zero_stage: int, mode: str | None) -> None:
    rows = []
    if pp_size != 1:
        rows.append((f"pp_size={pp_size}", "pipeline parallelism is not there yet: leave pp_size=1"))
    if sp_size != 1 or mode is not None:
        rows.append(
            (
                f"sp_size={sp_size}, sequence_parallelism_mode={mode!r}",
                "sequence parallelism is not there yet: leave sp_size=1, None",
            )
        )
    if zero_stage != 0:
        rows.append((f"zero_stage={zero_stage}", "sharded optimizer states are not there yet: leave zero_stage=0"))
    if rows:
        raise ConfigError(explain("HybridParallelPlugin of this version offers tensor and data parallelism.", rows))
