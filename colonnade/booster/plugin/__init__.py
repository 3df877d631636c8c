"""Plugins: one file a parallel strategy."""

from colonnade.booster.plugin.hybrid_parallel_plugin import HybridParallelPlugin
from colonnade.booster.plugin.low_level_zero_plugin import LowLevelZeroPlugin
from colonnade.booster.plugin.plugin_base import DPPluginBase, Plugin
from colonnade.booster.plugin.torch_ddp_plugin import TorchDDPPlugin
from colonnade.booster.plugin.torch_fsdp_plugin import TorchFSDPPlugin

__all__ = ["DPPluginBase", "HybridParallelPlugin", "LowLevelZeroPlugin", "Plugin", "TorchDDPPlugin", "TorchFSDPPlugin"]
