"""What an optimizer keeps for each parameter, in terms of the logical parameter: how it is saved, and how it is taken back.

[Note: what is kept in a form that any layout can load]
Whatever an optimizer keeps for a parameter is one of three things: a value for each entry of the parameter (moments), which
lies as the parameter does; one number (a step count), the same on all ranks; or something smaller for the whole parameter
(statistics by row and by column), of which an optimizer that splits it says how it lies. So a state is known by the name of
its parameter and its own key, whatever ZeRO, tensor parallelism or a pipeline do, and another layout can take it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.cluster.mesh import ParallelMesh
from colonnade.errors import CheckpointError, explain
from colonnade.model.layout import TensorLayout, layout_of, local_of
from colonnade.model.pieces import Piece, pieces_of


class Shape(NamedTuple):
    """A tensor that has been saved: its logical shape and its format."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Shard:
    """What this rank has of a logical tensor.

    Args:
        shape: of the logical tensor.
        dtype: its format.
        pieces: this rank's boxes of it; views, which loading writes into.
        axes: mesh axes along which ranks hold different boxes; along all others they hold the same.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece]
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParameterState:
    """What an optimizer keeps for a parameter, or for the part of it that this rank steps on.

    A parameter may have several, for several parts.

    Args:
        param: the model's own.
        tensors: by key of the optimizer's state.
        numbers: by key, what is one number for the whole parameter, or no tensor at all; tensors without dims included.
        master: the float32 copy that the optimizer steps on; None where it steps on the parameter itself.
    """

    param: nn.Parameter
    tensors: dict[str, Shard]
    numbers: dict[str, Any]
    master: Shard | None = None


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint has for a parameter.

    Args:
        tensors: by key, their logical shapes and formats.
        numbers: by key, what is one number, or no tensor.
    """

    tensors: dict[str, Shape]
    numbers: dict[str, Any]


State = dict[str, Any]
Boxes = Callable[[torch.Tensor], list[Piece]]


def is_of_entries(key: str, value: Any, shape: Sequence[int]) -> bool:
    """Whether a state has a number for each entry of a tensor. (Of one without dims the shape does not tell.)"""
    return isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(shape) and key != "step"


def state_of(
    optimizer: Optimizer, group: Mapping[str, Any], param: nn.Parameter, tensor: nn.Parameter, mesh: ParallelMesh
) -> tuple[dict[str, Shard], dict[str, Any]]:
    """What an optimizer keeps for a parameter: what lies over ranks, and what is one number.

    Args:
        param: the model's.
        tensor: what is stepped on, of the parameter's local shape.

    Raises:
        CheckpointError: it is not known how a part of it lies.
    """
    layout, local = layout_of(param), local_of(tensor.detach())
    position = holder_position(mesh, layout)
    tensors: dict[str, Shard] = {}
    numbers: dict[str, Any] = {}
    for key, value in optimizer.state.get(tensor, {}).items():
        reduced = _reduced_layout(optimizer, group, tensor, key, value)
        if reduced is not None:
            tensors[key] = Shard(reduced.shape, value.dtype, pieces_of(value, reduced), reduced.sharded_axes)
        elif is_of_entries(key, value, local.shape):
            tensors[key] = Shard(layout.shape, value.dtype, pieces_of(value, layout, position), layout.sharded_axes)
        elif not isinstance(value, torch.Tensor) or not value.dim():
            numbers[key] = value
        elif not layout.sharded_axes:
            tensors[key] = Shard(tuple(value.shape), value.dtype, [Piece((0,) * value.dim(), value)])
        else:
            raise CheckpointError(_unknown(optimizer, key, value, layout))
    return tensors, numbers


def _reduced_layout(
    optimizer: Any, group: Mapping[str, Any], tensor: torch.Tensor, key: str, value: Any
) -> TensorLayout | None:
    """How a state of fewer entries than its parameter lies; None where it is no such state."""
    if not (hasattr(optimizer, "keeps_reduced") and optimizer.keeps_reduced(group, key)):
        return None
    layout = optimizer.state_layout(tensor, group, key)
    return TensorLayout.whole(value.shape) if layout is None or layout.shape == tuple(value.shape) else layout


def _unknown(optimizer: Optimizer, key: str, value: torch.Tensor, layout: TensorLayout) -> str:
    return explain(
        f"the state {key!r} of {type(optimizer).__name__} cannot be saved: it is not known how it lies over the ranks.",
        [
            ("found", f"shape {tuple(value.shape)} for a parameter of {layout.shape}, of which this rank has {layout.local_shape}"),
            ("rule", "a state has one number, one for each entry, or its parameter is not split"),
            ("try", "an optimizer of colonnade.optim, which says how; or save_model alone"),
        ],
    )  # fmt: skip


def new_state(
    optimizer: Any, group: Mapping[str, Any], param: nn.Parameter, tensor: nn.Parameter, saved: SavedState, old: State
) -> tuple[State, dict[str, Shard]]:
    """Memory for a state that was saved, and what of it is to be filled.

    What is smaller than its parameter is taken back whole: an optimizer that splits it cuts it at its next step.

    Args:
        old: the state until now, whose memory is used again where it fits.
    """
    layout, local = layout_of(param), local_of(tensor.detach())
    state = numbers_for(saved.numbers, group, local.device)
    targets: dict[str, Shard] = {}
    for key, (shape, dtype) in saved.tensors.items():
        reduced = hasattr(optimizer, "keeps_reduced") and optimizer.keeps_reduced(group, key)
        if tuple(shape) == layout.shape and not reduced:
            state[key] = memory_like(local, dtype, old.get(key))
            targets[key] = Shard(layout.shape, dtype, pieces_of(state[key], layout), layout.sharded_axes)
        else:
            state[key] = torch.zeros(shape, dtype=dtype, device=local.device)
            targets[key] = Shard(tuple(shape), dtype, [Piece((0,) * len(shape), state[key])])
    return state, targets


def memory_like(tensor: torch.Tensor, dtype: torch.dtype, old: Any) -> torch.Tensor:
    """Memory of the shape of a tensor, in a format: that of an old state where it fits, else new, which is zero."""
    if isinstance(old, torch.Tensor) and (old.shape, old.dtype, old.device) == (tensor.shape, dtype, tensor.device):
        return old
    return torch.zeros_like(tensor, dtype=dtype)


def numbers_for(numbers: Mapping[str, Any], group: Mapping[str, Any], device: torch.device) -> State:
    """Numbers as an optimizer keeps them: counts of fused and capturable ones are where the parameter is."""
    there = device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    return {k: v.to(there, copy=True) if isinstance(v, torch.Tensor) else v for k, v in numbers.items()}


def holder_position(mesh: ParallelMesh, layout: TensorLayout) -> int | None:
    """This rank's position on the axis to which the `holders` of a layout belong."""
    return mesh.rank(layout.sharded_axes[0]) if layout.sharded_axes else None


def whole_shard(param: nn.Parameter, tensor: torch.Tensor, mesh: ParallelMesh | None = None) -> Shard:
    """All that this rank has of a parameter, in a tensor of its local shape.

    Args:
        mesh: given where it is to be written: then what several ranks hold is given by the first of them.
    """
    layout, local = layout_of(param), local_of(tensor.detach())
    position = None if mesh is None else holder_position(mesh, layout)
    return Shard(layout.shape, local.dtype, pieces_of(local, layout, position), layout.sharded_axes)
