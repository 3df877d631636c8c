"""Roles whose layer depends on the ShardConfig or on the native module. The only place that knows such flags."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_reduce
from colonnade.model.layout import TensorLayout, set_layout
from colonnade.shardformer.layer import Conv1D_Col, Conv1D_Row, FusedLayerNorm, FusedRMSNorm, Linear1D_Col, Linear1D_Row
from colonnade.shardformer.layer.fused_linear import is_conv1d
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
        if not config.enable_fused_normalization:
            return module
        fused = FusedLayerNorm if isinstance(module, nn.LayerNorm) else FusedRMSNorm
        return fused.from_native_module(module, axis)


class HeadNorm(Role):
    """A norm inside a region that is applied to each head: every rank sees its own heads' share of the gradient."""

    @classmethod
    def apply(cls, module: nn.Module, config: ShardConfig, axis: Axis) -> nn.Module:
        for param in module.parameters(recurse=False):
            sum_gradient(param, module, axis)
        return Norm.apply(module, config, axis)


def sum_gradient(param: nn.Parameter, module: nn.Module, axis: Axis) -> None:
    """Complete the gradient of a whole parameter that is used inside a region: each backward yields only a share.

    The sum is taken by a hook on the leaf, before the gradient is accumulated, so it holds under gradient
    accumulation and with or without a plugin. The hook is set at the first forward in which the parameter trains, so
    a parameter may be frozen now and thawed later.
    """
    if axis.size == 1:
        return
    set_layout(param, TensorLayout.whole(param.shape, partial_axes=(axis.name,)))
    hooked: list[Any] = []

    def summed(grad: torch.Tensor) -> torch.Tensor:
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), axis)

    def ensure(*_: Any) -> None:
        if param.requires_grad and not hooked:
            hooked.append(param.register_hook(summed))

    module.register_forward_pre_hook(ensure)


def form_for(target: Any, module: nn.Module) -> Any:
    """The layer class for a native module: the Conv1D form of a linear layer where the module is a Conv1D."""
    return CONV1D_FORMS.get(target, target) if is_conv1d(module) else target
