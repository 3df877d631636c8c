"""Plugins: one file a parallel strategy."""

from colonnade.booster.plugin.hybrid_parallel_plugin import HybridParallelPlugin
from colonnade.booster.plugin.low_level_zero_plugin import LowLevelZeroPlugin
from colonnade.booster.plugin.pipeline_options import PipelineGradientCheckpointConfig
from colonnade.booster.plugin.plugin_base import DPPluginBase, Plugin
from colonnade.booster.plugin.torch_ddp_plugin import TorchDDPPlugin
from colonnade.booster.plugin.torch_fsdp_plugin import TorchFSDPPlugin
from colonnade.precision.loss_scale import LossScale

__all__ = [
    "DPPluginBase",
    "HybridParallelPlugin",
    "LossScale",
    "LowLevelZeroPlugin",
    "PipelineGradientCheckpointConfig",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]
