"""LowLevelZeroPlugin: data parallelism that deals optimizer states, and gradients, out over the ranks. Any module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from colonnade.booster.plugin.checks import check_boostable, pristine_config
from colonnade.booster.plugin.plugin_base import Boosted, DPPluginBase
from colonnade.booster.plugin.start import put_in_place, start_alike
from colonnade.cluster.mesh import ParallelMesh
from colonnade.model.lazy import check_all_or_none_meta
from colonnade.precision.clipping import Clipping
from colonnade.precision.loss_scale import LossScale
from colonnade.precision.precision import DEFAULT_PRECISION, cast_parameters
from colonnade.shardformer.layer.loss import LossAverage, average_causal_loss
from colonnade.zero.options import ZeroOptions, check_stage


class LowLevelZeroPlugin(DPPluginBase):
    """Every rank holds the whole model and a share of the batch; optimizer states are dealt out over the ranks.

    After `booster.backward` gradients are in flat buckets and no longer on the parameters. `optimizer.step` steps on the
    part that this rank owns, with torch's fused kernels where the optimizer is torch's own and leaves the choice open.

    Memory of a rank for Ψ parameters on N ranks, 16-bit precision with Adam: stage 1 4Ψ + 12Ψ/N bytes, stage 2
    2Ψ + 14Ψ/N. Traffic of a step: 2Ψ elements; with k accumulation steps stage 1 inside `no_sync` 2Ψ as well, stage 2
    kΨ + Ψ (its gradients are never whole on a rank, so it has no `no_sync`).

    Args:
        stage: 1 (optimizer states) or 2 (gradients too).
        precision: "bf16" or "fp16" (parameters and activations in 16 bits, optimizer on float32 master weights), or "fp32".
        max_norm: gradients are clipped to this global norm; 0 leaves them.
        max_value: every entry of a gradient is clipped to this size instead; 0 leaves them.
        loss_scale: how the loss scale of fp16 starts and moves.
        bucket_bytes, communication_dtype, overlap_communication, cpu_offload: see `ZeroOptions`.
        num_microbatches, microbatch_size: how `execute_pipeline` cuts a batch; by default not at all.

    Raises:
        ConfigError: options that do not exist or cannot work.
    """

    def __init__(
        self,
        stage: int = 1,
        *,
        precision: str = DEFAULT_PRECISION,
        max_norm: float = 0.0,
        max_value: float = 0.0,
        loss_scale: LossScale | None = None,
        bucket_bytes: int = 4 << 20,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        cpu_offload: bool = False,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
    ) -> None:
        self.stage = check_stage(stage, (1, 2))
        self.options = ZeroOptions(bucket_bytes, communication_dtype, overlap_communication, cpu_offload)
        clipping = Clipping(max_norm, max_value)
        super().__init__(ParallelMesh(), precision, clipping, loss_scale, microbatch_size, num_microbatches)

    def support_no_sync(self) -> bool:
        return self.stage == 1

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        check_boostable(model, optimizer)
        is_meta = check_all_or_none_meta(model)
        config, average = pristine_config(model), LossAverage()
        start_alike(model, self.mesh)
        average_causal_loss(model, average)
        put_in_place(model)
        parallel_optimizer = None
        if optimizer is not None:
            parallel_optimizer = self.sharded(optimizer, model, self.stage, self.options)
        cast_parameters(model, self.dtype)
        boosted = self.wrap(model, average, parallel_optimizer, config, unloaded=is_meta)
        return boosted, parallel_optimizer, criterion, dataloader, lr_scheduler

    def __repr__(self) -> str:
        return f"LowLevelZeroPlugin({self.mesh!r}, stage {self.stage}, {self.precision})"
