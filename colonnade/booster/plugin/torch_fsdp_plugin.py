"""TorchFSDPPlugin: fully sharded data parallelism by torch's FSDP2. Any module, no policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from colonnade.booster.plugin.checks import check_boostable, pristine_config
from colonnade.booster.plugin.plugin_base import Boosted, DPPluginBase
from colonnade.booster.plugin.start import start_alike
from colonnade.cluster.mesh import ParallelMesh
from colonnade.errors import ConfigError, explain
from colonnade.fsdp import LocalShards, ShardedGradients, ShardOptions, check_shardable, shard_model
from colonnade.model.lazy import check_all_or_none_meta
from colonnade.precision.clipping import Clipping
from colonnade.precision.loss_scale import LossScale
from colonnade.precision.precision import DEFAULT_PRECISION, cast_parameters, parse_precision
from colonnade.shardformer.inference.trace import find_blocks
from colonnade.shardformer.layer.loss import LossAverage, average_causal_loss
from colonnade.shardformer.shard.sharder import refuse_to_save


class TorchFSDPPlugin(DPPluginBase):
    """Every rank holds a share of each parameter, its gradient and its states, and a share of the batch.

    Each repeated block is gathered for as long as it computes; embedding, norm and head are gathered together. Parameters
    stay in float32, which are the master weights; with 16 bits they are cast when they are gathered, and what is saved is
    float32. The model's Parameter objects are replaced; the optimizer's groups hold the new ones in the old order.

    `no_sync` keeps the gradients of the whole model on every rank, and the last backward before a step must be outside.
    A model built under `torch.device("meta")` is never whole on any rank: boost it, then `booster.load_model`.

    Args:
        reshard_after_forward: True: blocks and the rest of the model are freed after their forward and gathered again in
            the backward pass; None: the rest of the model stays until then; False: all stay, for a third less traffic; a
            whole number: whole parameters stay, spread over groups of so many ranks.
        cpu_offload: keep parameters, gradients and optimizer states in host memory (True, or torch's CPUOffloadPolicy).
        reduce_dtype: "fp32", "bf16" or "fp16": format in which gradients are summed; by default that of `precision`.
        precision: "bf16" or "fp16" (computation in 16 bits, optimizer on float32), or "fp32".
        max_norm: gradients are clipped to this global norm; 0 leaves them.
        max_value: every entry of a gradient is clipped to this size instead; 0 leaves them.
        loss_scale: how the loss scale of fp16 starts and moves.
        num_microbatches, microbatch_size: how `execute_pipeline` cuts a batch; by default not at all.

    Raises:
        ConfigError: on every rank alike, for options that do not fit, and where there is no process group.
    """

    def __init__(
        self,
        reshard_after_forward: bool | int | None = True,
        cpu_offload: bool | CPUOffloadPolicy = False,
        reduce_dtype: str | None = None,
        *,
        precision: str = DEFAULT_PRECISION,
        max_norm: float = 0.0,
        max_value: float = 0.0,
        loss_scale: LossScale | None = None,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
    ) -> None:
        mesh, clipping = ParallelMesh(), Clipping(max_norm, max_value)
        super().__init__(mesh, precision, clipping, loss_scale, microbatch_size, num_microbatches)
        reduced = None if reduce_dtype is None else parse_precision(reduce_dtype, "reduce_dtype")
        self._options = ShardOptions(reshard_after_forward, cpu_offload, None, reduced)
        self._options.check(mesh.size("dp"))
        if mesh.device_mesh is None:
            raise ConfigError(
                explain(
                    "TorchFSDPPlugin needs a process group, for one process too.",
                    [("try", "colonnade.launch_from_torch() first, under colonnade run --nproc-per-node 1 …")],
                )
            )

    @property
    def shard_options(self) -> ShardOptions:
        """How models are cut, in the plugin's precision."""
        return replace(self._options, param_dtype=None if self.dtype == torch.float32 else self.dtype)

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        check_boostable(model, optimizer)
        check_shardable(model, optimizer, self.mesh.axis("dp"))
        is_meta = check_all_or_none_meta(model)
        config, average = pristine_config(model), LossAverage()
        start_alike(model, self.mesh)
        average_causal_loss(model, average)
        cast_parameters(model, torch.float32)
        blocks = [model.get_submodule(path) for path in find_blocks(model)]
        sharding = shard_model(model, blocks, self.mesh, self.shard_options, optimizer)
        if hasattr(model, "save_pretrained"):
            model.save_pretrained = refuse_to_save  # type: ignore[assignment]
        parallel_optimizer = None
        if optimizer is not None:
            gradients = ShardedGradients(sharding)
            parallel_optimizer = self.parallel(optimizer, LocalShards(optimizer, self.mesh, gradients))
            parallel_optimizer.reducer = gradients
        boosted = self.wrap(model, average, parallel_optimizer, config, unloaded=is_meta)
        boosted.in_step = True
        return boosted, parallel_optimizer, criterion, dataloader, lr_scheduler

    def __repr__(self) -> str:
        return f"TorchFSDPPlugin({self.mesh!r}, {self.precision})"
