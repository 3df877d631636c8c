"""Plugins: one file a parallel strategy."""

from colonnade.booster.plugin.hybrid_parallel_plugin import HybridParallelPlugin
from colonnade.booster.plugin.plugin_base import DPPluginBase, Plugin
from colonnade.booster.plugin.torch_ddp_plugin import TorchDDPPlugin

__all__ = ["DPPluginBase", "HybridParallelPlugin", "Plugin", "TorchDDPPlugin"]
