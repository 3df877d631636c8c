"""Roles whose layer depends on the ShardConfig or on the native module. The only place that knows such flags."""

from __future__ import annotations

from typing import Any

from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.model.adapters import is_from_peft
from colonnade.shardformer.layer import Conv1D_Col, Conv1D_Row, FusedLayerNorm, FusedRMSNorm, Linear1D_Col, Linear1D_Row
from colonnade.shardformer.layer.fused_linear import is_conv1d
from colonnade.shardformer.layer.partial import sum_gradient
from colonnade.shardformer.shard.shard_config import ShardConfig

CONV1D_FORMS: dict[type, type] = {Linear1D_Col: Conv1D_Col, Linear1D_Row: Conv1D_Row}


class Role:
    """Decides at sharding time what becomes of a module."""

    @classmethod
    def apply(cls, module: nn.Module, config: ShardConfig, axis: Axis) -> nn.Module:
        """The module that takes the place of `module`; possibly itself."""
        raise NotImplementedError


class Replicated(Role):
    """Stays as it is, whole on every rank."""

    @classmethod
    def apply(cls, module: nn.Module, config: ShardConfig, axis: Axis) -> nn.Module:
        return module


class Norm(Role):
    """A norm outside the regions."""

    @classmethod
    def apply(cls, module: nn.Module, config: ShardConfig, axis: Axis) -> nn.Module:
        if not config.enable_fused_normalization or is_from_peft(module):  # trained as a copy beside the original
            return module
        fused = FusedLayerNorm if isinstance(module, nn.LayerNorm) else FusedRMSNorm
        return fused.from_native_module(module, axis)


class HeadNorm(Role):
    """A norm inside a region that is applied to each head: every rank sees its own heads' share of the gradient."""

    @classmethod
    def apply(cls, module: nn.Module, config: ShardConfig, axis: Axis) -> nn.Module:
        for param in module.parameters(recurse=False):
            sum_gradient(param, axis, module)
        return Norm.apply(module, config, axis)


def form_for(target: Any, module: nn.Module) -> Any:
    """The layer class for a native module: the Conv1D form of a linear layer where the module is a Conv1D."""
    return CONV1D_FORMS.get(target, target) if is_conv1d(module) else target
