"""What an optimizer keeps for each parameter, in terms of the logical parameter: how it is saved, and how it is taken back.

[Note: what is kept in a form that any layout can load]
Whatever an optimizer keeps for a parameter is one of three things: a value for each entry of the parameter (moments), which
lies as the parameter does; one number (a step count), the same on all ranks; or something smaller for the whole parameter
(statistics by row and by column), of which an optimizer that splits it says how it lies. So a state is known by the name of
its parameter and its own key, whatever ZeRO, tensor parallelism or a pipeline do, and another layout can take it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from colonnade.model.pieces import Piece


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
