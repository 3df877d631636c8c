"""The tensors of a model as its checkpoint knows them: state-dict names, each tied tensor once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from colonnade.errors import CheckpointError, explain
from colonnade.model.layout import TensorLayout, layout_of, local_of


def named_tensors(model: nn.Module) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    """Parameters and persistent buffers in state-dict order, with all names of each.

    Tensors are one where they are one object or lie at the same place in memory, or where a layout says so.
    """
    found: dict[Any, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        names, _ = found.setdefault(_identity(tensor), ([], tensor))
        names.extend(n for n in layout_of(tensor).names or (name,) if n not in names)
    return [(tuple(names), tensor) for names, tensor in found.values()]


def extra_state(model: nn.Module) -> list[str]:
    """Names of state-dict entries that are not tensors; no safetensors file can hold them."""
    return [name for name, value in model.state_dict(keep_vars=True).items() if not isinstance(value, torch.Tensor)]


def _identity(tensor: torch.Tensor) -> Any:
    local = local_of(tensor.detach())
    if local.is_meta or local.numel() == 0:  # no place in memory to go by
        return id(tensor)
    return local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride()


def check_layout(name: str, tensor: torch.Tensor) -> TensorLayout:
    """The tensor's layout.

    Raises:
        CheckpointError: where the local tensor is smaller than its layout says, or has no memory yet.
    """
    local, layout = local_of(tensor.detach()), layout_of(tensor)
    if local.is_meta:
        raise CheckpointError(
            explain(f"{name} is on the meta device: it has no memory yet.", [("try", "materialise the model first")])
        )
    if local.dim() != len(layout.shape) or any(have < need for have, need in zip(local.shape, layout.local_shape)):
        raise CheckpointError(
            f"{name} is a local tensor of shape {tuple(local.shape)}, but its layout speaks of {layout.local_shape} "
            f"out of {layout.shape}."
        )
    return layout
