"""Arguments with an entry for each head: a module whose heads are split gets its own heads' share of them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.regions import copy_to_region
from colonnade.model.layout import Range


def slice_argument(module: nn.Module, name: str, dim: int, held: Range, heads: int, folded: bool, axis: Axis) -> None:
    """Let a module's forward see only this rank's heads of an argument.

    Args:
        name: of the argument.
        dim: along which its heads lie.
        held: this rank's heads, of `heads`.
        folded: the dimension is rows × heads.

    Traffic: where the argument trains, backward one all-reduce of its gradient.
    """
    names = list(inspect.signature(module.forward).parameters)
    position = names.index(name)

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or (not folded and value.shape[dim] != heads):
            return value  # made from parameters that are cut: this rank's heads already, or one for all heads
        value = copy_to_region(value, axis)
        if folded:
            split = value.unflatten(dim, (-1, heads))
            return split.narrow(dim + 1, held.start, held.size).flatten(dim, dim + 1)
        return value.narrow(dim, held.start, held.size)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if position < len(args):
            args = (*args[:position], cut(args[position]), *args[position + 1 :])
        elif name in kwargs:
            kwargs = kwargs | {name: cut(kwargs[name])}
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)
