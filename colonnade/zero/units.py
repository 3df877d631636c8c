"""Unit: a tensor that the optimizer steps on, standing for a run of entries of several parameters.

[Note: units and unused parameters]
Whatever this rank owns of a bucket is one unit: one flat tensor, one state, one step count. That is right as long as its
parameters are used together. Where a step finds that some of them got a gradient and others did not, the unit is cut between
them, its state with it: from then on each part steps when it is used, with the step count of its own, as parameters do in
one process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.cluster.mesh import ParallelMesh
from colonnade.model.layout import layout_of, set_layout
from colonnade.model.pieces import pieces_of_range
from colonnade.precision.grad_norm import Axes, counted_parts
from colonnade.precision.state import (
    ParameterState,
    SavedState,
    Shard,
    State,
    holder_position,
    is_of_entries,
    memory_like,
    new_state,
    numbers_for,
    state_of,
    whole_shard,
)
from colonnade.zero.bucket import ShardBucket
from colonnade.zero.storage import Piece


class Unit:
    """What the optimizer steps on in place of a run of pieces.

    Args:
        bucket: whose part it is of.
        pieces: what lies in it, at offsets of the storage.
        tensor: float32 values; a view of the storage, or a copy.
    """

    def __init__(self, bucket: ShardBucket, pieces: list[Piece], tensor: nn.Parameter) -> None:
        self.bucket, self.pieces, self.tensor = bucket, pieces, tensor
        if bucket.storage.plan.whole:  # it is a parameter like any other
            set_layout(tensor, layout_of(pieces[0].param))
        self.start, self.stop = pieces[0].offset, pieces[-1].there.stop
        self.params = {piece.param for piece in pieces}
        self._runs = [(*kind, list(run)) for kind, run in groupby(pieces, _norm_class)]
        self._masks: dict[nn.Parameter, torch.Tensor] = {}

    def model_part(self) -> torch.Tensor:
        """The entries of the model that it stands for, flat."""
        return self.bucket.storage.flat[self.start : self.stop]

    def gradient(self) -> torch.Tensor:
        """Its part of the averaged gradient, zero where there is none, in the format and on the device of its tensor."""
        if self.bucket.gradient is None:
            return torch.zeros_like(self.tensor)
        first = self.bucket.plan.part(self.bucket.axis.rank)[0]
        part = self.bucket.gradient[self.start - first : self.stop - first]
        return part.to(self.tensor.device, self.tensor.dtype).view(self.tensor.shape)

    def counted(self, mesh: ParallelMesh) -> Iterable[tuple[Axes, list[torch.Tensor]]]:
        """What this rank counts of its gradient, by the axes that split it; see precision/grad_norm.py."""
        grad = self.tensor.grad
        if grad is None:
            return
        for axes, shared, pieces in self._runs:
            flat = grad.reshape(-1)[pieces[0].offset - self.start : pieces[-1].there.stop - self.start]
            yield axes, [self._mine(piece, grad, mesh) for piece in pieces] if shared else [flat]

    def _mine(self, piece: Piece, grad: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
        """Of a parameter that has entries which several ranks hold: those that this rank counts."""
        if piece.param not in self._masks:
            mask = torch.zeros(piece.param.shape, dtype=torch.bool, device=grad.device)
            for part in counted_parts(piece.param, mask, mesh):
                part.fill_(True)
            self._masks[piece.param] = piece.of(mask)
        offset = piece.offset - self.start
        return grad.reshape(-1)[offset : offset + piece.stop - piece.start][self._masks[piece.param]]

    def states(
        self, optimizer: Optimizer, group: dict[str, Any], mesh: ParallelMesh, copied: bool
    ) -> list[ParameterState]:
        """What the optimizer keeps for it, by parameter.

        Args:
            copied: its tensor is a copy of the weights.
        """
        if self.bucket.storage.plan.whole:
            param = self.pieces[0].param
            tensors, numbers = state_of(optimizer, group, param, self.tensor, mesh)
            tensors = {key: replace(shard, axes=("dp", *shard.axes)) for key, shard in tensors.items()}
            master = replace(whole_shard(param, self.tensor, mesh), axes=self._axes(param)) if copied else None
            return [ParameterState(param, tensors, numbers, master)]
        state = optimizer.state.get(self.tensor, {})
        flat = {k: v for k, v in state.items() if is_of_entries(k, v, self.tensor.shape)}
        numbers = {k: v for k, v in state.items() if k not in flat}
        found = []
        for piece in self.pieces:
            position = holder_position(mesh, layout_of(piece.param))
            tensors = {key: self._shard(piece, value, position) for key, value in flat.items()}
            master = self._shard(piece, self.tensor.detach(), position) if copied else None
            found.append(ParameterState(piece.param, tensors, numbers, master))
        return found

    def restored(
        self, optimizer: Optimizer, group: dict[str, Any], saved: SavedState | None, copied: bool
    ) -> tuple[State, list[ParameterState]]:
        """A state with memory for what was saved, the same kind for all of its parameters; and what is to be filled.

        The state until now is forgotten, and its memory used again where it fits.
        """
        old = optimizer.state.pop(self.tensor, {})
        if self.bucket.storage.plan.whole:
            param = self.pieces[0].param
            state, tensors = State(), dict[str, Shard]()
            if saved is not None:
                state, tensors = new_state(optimizer, group, param, self.tensor, saved, old)
            master = whole_shard(param, self.tensor) if copied else None
            return state, [ParameterState(param, tensors, {}, master)]
        state, flat = State(), dict[str, torch.Tensor]()
        if saved is not None:
            state = numbers_for(saved.numbers, group, self.tensor.device)
            like = self.tensor.detach()
            flat = {key: memory_like(like, of.dtype, old.get(key)) for key, of in saved.tensors.items()}
        found = []
        for piece in self.pieces:
            tensors = {key: self._shard(piece, value, None) for key, value in flat.items()}
            master = self._shard(piece, self.tensor.detach(), None) if copied else None
            found.append(ParameterState(piece.param, tensors, {}, master))
        return state | flat, found

    def _axes(self, param: nn.Parameter) -> tuple[str, ...]:
        return ("dp", *layout_of(param).sharded_axes)

    def _shard(self, piece: Piece, value: torch.Tensor, position: int | None) -> Shard:
        """What of a tensor as large as this unit belongs to a piece."""
        layout, first = layout_of(piece.param), piece.offset - self.start
        flat = value.view(-1)[first : first + piece.stop - piece.start]
        boxes = pieces_of_range(flat, layout, piece.start, piece.stop, position)
        return Shard(layout.shape, value.dtype, boxes, self._axes(piece.param))

    def cut(self, runs: list[list[Piece]], state: State) -> list[tuple[Unit, State]]:
        """The unit in several parts, each with its part of the state."""
        parts = []
        for pieces in runs:
            there = slice(pieces[0].offset - self.start, pieces[-1].there.stop - self.start)
            tensor = nn.Parameter(self.tensor.data[there])
            parts.append((Unit(self.bucket, pieces, tensor), cut_state(state, self.tensor, there)))
        return parts


def _norm_class(piece: Piece) -> tuple[Axes, bool]:
    layout = layout_of(piece.param)
    return ("dp", *layout.sharded_axes), any(box.holders for box in layout.boxes)


def cut_state(state: State, tensor: torch.Tensor, there: slice) -> State:
    """What of an optimizer's state for a flat tensor belongs to a part of it."""
    parts = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            value = value[there] if value.shape == tensor.shape else value.clone()
        parts[key] = value
    return parts


def joined_state(pieces: list[Piece], states: dict[nn.Parameter, State], like: torch.Tensor) -> State:
    """The state of a unit, from those that an optimizer has for the parameters themselves.

    Args:
        states: of each parameter, alike as `state_kind` says it.
        like: the unit's tensor.
    """
    first = states[pieces[0].param]
    joined: State = {}
    for key, value in first.items():
        if is_of_entries(key, value, pieces[0].param.shape):
            flat = torch.zeros(like.numel(), dtype=value.dtype, device=like.device)
            for piece in pieces:
                offset = piece.offset - pieces[0].offset
                flat[offset : offset + piece.stop - piece.start] = piece.of(states[piece.param][key])
            joined[key] = flat.view(like.shape)
        else:
            joined[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return joined


def state_kind(state: State, param: nn.Parameter) -> list[tuple[str, Any]]:
    """What has to be the same for parameters to share a unit: which states they have, and those that are one number."""
    kind: list[tuple[str, Any]] = []
    for key in sorted(state):
        value = state[key]
        if not isinstance(value, torch.Tensor):
            kind.append((key, value))
        elif value.numel() == 1 and not is_of_entries(key, value, param.shape):
            kind.append((key, float(value)))
        else:
            kind.append((key, value.dtype))
    return kind


def saved_kind(saved: SavedState | None) -> object:
    """As `state_kind`, of what a checkpoint has for a parameter: numbers exactly, and no shapes, which differ anyway."""
    if saved is None:
        return None
    numbers = {key: v.tolist() if isinstance(v, torch.Tensor) else v for key, v in saved.numbers.items()}
    return numbers, {key: of.dtype for key, of in saved.tensors.items()}
