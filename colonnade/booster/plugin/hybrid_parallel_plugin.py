"""HybridParallelPlugin: tensor parallelism within groups of ranks, data parallelism over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from colonnade.booster.plugin.batches import microbatching_problems
from colonnade.booster.plugin.checks import boosted_model, boosted_optimizer, check_boostable, pristine_config
from colonnade.booster.plugin.pipeline import Pipeline, PipelinePlan
from colonnade.booster.plugin.pipeline_options import (
    PipelineGradientCheckpointConfig,
    PipelineOptions,
    pipeline_problems,
    staging_problems,
)
from colonnade.booster.plugin.plugin_base import Boosted, DPPluginBase
from colonnade.booster.plugin.start import put_in_place, start_alike
from colonnade.cluster.mesh import ParallelMesh
from colonnade.comm.reducer import GradientReducer
from colonnade.errors import ConfigError, UsageError, explain, refuse
from colonnade.model.lazy import check_all_or_none_meta
from colonnade.precision.clipping import Clipping
from colonnade.precision.loss_scale import LossScale
from colonnade.precision.optimizer import ParallelOptimizer
from colonnade.precision.precision import DEFAULT_PRECISION, cast_parameters
from colonnade.shardformer import Policy, ShardConfig, ShardFormer
from colonnade.shardformer.layer.loss import LossAverage
from colonnade.zero.options import ZeroOptions, check_stage

ONLY_FOR_STAGES = ("num_model_chunks", "num_layers_per_stage", "gradient_checkpoint_config")


class HybridParallelPlugin(DPPluginBase):
    """Splits a model over `tp_size` ranks by a ShardFormer policy, and the batch over the groups of such ranks.

    Consecutive ranks form a tensor-parallel group; the number of groups is the world size / tp_size.

    Args:
        tp_size: ranks that share one model.
        pp_size: pipeline stages' ranks: consecutive blocks lie on different ranks, and `execute_pipeline` runs micro-batches
            through them.
        sp_size, sequence_parallelism_mode: not available in this version; leave them as they are.
        pp_style: name of the schedule, "1f1b", "gpipe", "interleaved", "zbh1" or "zbv".
        num_model_chunks: stages on each rank, for "interleaved" (by default 2).
        num_layers_per_stage: blocks of each stage; by default as evenly as their costs allow.
        gradient_checkpoint_config: which blocks of a pipeline are computed again in the backward pass.
        check_cut: try the cut on a tiny twin before the model is changed, where the family has no policy of its own.
        zero_stage: 1 deals optimizer states out over data-parallel ranks, 2 gradients too; see `LowLevelZeroPlugin`.
        precision: "bf16" or "fp16" (parameters and activations in 16 bits, optimizer on float32 master weights), or "fp32".
        max_norm: gradients are clipped to this global norm; 0 leaves them.
        max_value: every entry of a gradient is clipped to this size instead; 0 leaves them.
        loss_scale: how the loss scale of fp16 starts and moves.
        enable_fused_normalization: replace norms by one fused operator each.
        enable_flash_attention: choose the fastest attention implementation that is installed.
        num_microbatches, microbatch_size: how `execute_pipeline` cuts a batch; by default not at all, and with a pipeline into
            2·pp_size micro-batches, or as many as there are rows.
        custom_policy: sharding policy, or its class, to use instead of the model family's own.
        bucket_bytes: size of the buckets in which gradients are averaged over data-parallel ranks.
        communication_dtype, overlap_communication, cpu_offload: for ZeRO; see `ZeroOptions`.
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
        precision: str = DEFAULT_PRECISION,
        max_norm: float = 0.0,
        max_value: float = 0.0,
        loss_scale: LossScale | None = None,
        sequence_parallelism_mode: str | None = None,
        pp_style: str = "1f1b",
        num_model_chunks: int | None = None,
        num_layers_per_stage: Sequence[int] | None = None,
        gradient_checkpoint_config: PipelineGradientCheckpointConfig | None = None,
        check_cut: bool = True,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        custom_policy: Policy | type[Policy] | None = None,
        bucket_bytes: int = 4 << 20,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        cpu_offload: bool = False,
        check_batches: bool = False,
    ) -> None:
        _refuse_what_is_missing(sp_size, sequence_parallelism_mode)
        cut = (num_model_chunks, num_layers_per_stage, gradient_checkpoint_config)
        refuse(
            [
                *pipeline_problems(pp_style, *cut),
                *staging_problems(pp_size, zero_stage, dict(zip(ONLY_FOR_STAGES, cut))),
                *microbatching_problems(microbatch_size, num_microbatches),
            ]
        )
        self.pipeline = PipelineOptions(pp_style, *cut, check_cut)
        self.zero_stage = check_stage(zero_stage, (0, 1, 2))
        self.options = ZeroOptions(bucket_bytes, communication_dtype, overlap_communication, cpu_offload)
        if zero_stage == 0 and (communication_dtype is not None or cpu_offload or not overlap_communication):
            raise ConfigError(
                "communication_dtype, overlap_communication and cpu_offload need zero_stage=1 or 2: they say how ZeRO works."
            )
        mesh = ParallelMesh(tp=tp_size, pp=pp_size, sp=sp_size)
        clipping = Clipping(max_norm, max_value)
        super().__init__(mesh, precision, clipping, loss_scale, microbatch_size, num_microbatches, check_batches)
        self.custom_policy = custom_policy() if isinstance(custom_policy, type) else custom_policy
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
        is_meta = check_all_or_none_meta(model)
        config, average = pristine_config(model), LossAverage()
        plan = PipelinePlan(model, self.mesh, self.pipeline) if self.mesh.size("pp") > 1 else None
        sharder = ShardFormer(self.shard_config).prepare(model, self.custom_policy, average)
        sharder.warn()
        start_alike(sharder.model, self.mesh)
        sharder.shard()
        model = sharder.model
        staged = None if plan is None else plan.apply(model)
        if plan is not None and optimizer is not None:
            plan.keep_own(model, optimizer)
        put_in_place(model)
        # made before the cast, so that the master weights are the weights as given
        parallel_optimizer = None if optimizer is None else self._parallel(optimizer, model, plan)
        cast_parameters(model, self.dtype)
        boosted = self.wrap(model, average, parallel_optimizer, config, unloaded=is_meta)
        if plan is not None and staged is not None:
            boosted.pipeline = Pipeline(plan, staged)
        return boosted, parallel_optimizer, criterion, dataloader, lr_scheduler

    def _parallel(self, optimizer: Optimizer, model: nn.Module, plan: PipelinePlan | None) -> ParallelOptimizer:
        copies = set() if plan is None else plan.shared.copies
        if self.zero_stage:
            parallel_optimizer = self.sharded(optimizer, model, self.zero_stage, self.options)
        else:
            parallel_optimizer = self.parallel(optimizer)
            own = [param for param in model.parameters() if param not in copies]
            parallel_optimizer.reducer = GradientReducer(own, self.mesh.axis("dp"), self.options.bucket_bytes)
        if plan is not None:
            parallel_optimizer.copies = plan.shared
        return parallel_optimizer

    def execute_pipeline(
        self,
        data_iter: Any,
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        boosted = boosted_model(model)
        if boosted.pipeline is None:
            return super().execute_pipeline(data_iter, model, criterion, optimizer, return_loss, return_outputs)
        return boosted.pipeline.execute(
            data_iter,
            boosted,
            criterion,
            None if optimizer is None else boosted_optimizer(optimizer),
            microbatch_size=self.microbatch_size,
            num_microbatches=self.num_microbatches,
            return_loss=return_loss,
            return_outputs=return_outputs,
        )

    def backward(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        if self.mesh.size("pp") > 1:
            raise UsageError(
                "with pp_size > 1 forward and backward are one: call booster.execute_pipeline(iterator, model, criterion, "
                "optimizer), then optimizer.step()."
            )
        super().backward(loss, optimizer)

    def support_no_sync(self) -> bool:
        return self.zero_stage < 2

    def __repr__(self) -> str:
        zero = f", ZeRO stage {self.zero_stage}" if self.zero_stage else ""
        return f"HybridParallelPlugin({self.mesh!r}{zero}, {self.precision})"


def _refuse_what_is_missing(sp_size: int, mode: str | None) -> None:
    if sp_size != 1 or mode is not None:
        raise ConfigError(
            explain(
                "HybridParallelPlugin of this version offers tensor, pipeline and data parallelism.",
                [
                    (
                        f"sp_size={sp_size}, sequence_parallelism_mode={mode!r}",
                        "sequence parallelism is not there yet: leave sp_size=1, None",
                    )
                ],
            )
        )
