"""Put the logical tensors together from what all ranks hold, by the layouts that ride on the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather_object
from colonnade.model.layout import TensorLayout, layout_of, local_of

Piece = tuple[torch.Tensor, TensorLayout]


@dataclass(frozen=True)
class LogicalTensor:
    """A logical tensor as the ranks together hold it, on the CPU.

    Args:
        value: the tensor; entries that no rank holds are 0.
        missing: number of entries that no rank holds.
        spread: largest difference between two ranks that hold the same entry; 0 where all replicas agree.
    """

    value: torch.Tensor
    missing: int
    spread: float


def canonical_names(model: nn.Module) -> dict[str, str]:
    """For every parameter name of an unmodified model, the first name of that parameter: tied weights share it."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def gather_parameters(
    model: nn.Module, read: Callable[[nn.Parameter], torch.Tensor | None], names: Mapping[str, str], axis: Axis
) -> dict[str, LogicalTensor]:
    """Read a tensor off every parameter and put the logical tensors together; a collective call, same result everywhere.

    Args:
        model: the user's model with its parallel parts inside; it may hold only some of the parameters.
        read: what to read, such as the parameter itself or its gradient; shaped like the parameter. A parameter for
            which it returns None is left out on this rank.
        names: canonical name of each name; a name not in it stands for itself.
        axis: the ranks that take part.
    """
    pieces: list[tuple[str, Piece]] = []
    for name, parameter in model.named_parameters():
        tensor = read(parameter)
        if tensor is not None:
            layout = layout_of(parameter)
            name = layout.names[0] if layout.names else name
            pieces.append((names.get(name, name), _portable(tensor, layout)))
    by_name: dict[str, list[Piece]] = {}
    for of_one_rank in all_gather_object(pieces, axis):
        for name, piece in of_one_rank:
            by_name.setdefault(name, []).append(piece)
    return {name: assemble(found) for name, found in by_name.items()}


def _portable(tensor: torch.Tensor, layout: TensorLayout) -> Piece:
    local = local_of(tensor.detach())
    return torch.empty(local.shape, dtype=local.dtype).copy_(local), layout


def assemble(pieces: Iterable[Piece]) -> LogicalTensor:
    """Merge local tensors, and compare those that hold the same entries.

    Raises:
        ValueError: where a local tensor has not the shape that its layout says, or two layouts disagree.
    """
    pieces = list(pieces)
    shape = pieces[0][1].shape
    value = torch.zeros(shape, dtype=pieces[0][0].dtype)
    held = torch.zeros(shape, dtype=torch.bool)
    spread = 0.0
    for local, layout in pieces:
        if layout.shape != shape:
            raise ValueError(f"ranks disagree on the shape of a logical tensor: {layout.shape} and {shape}")
        for box in layout.boxes:
            part = local[box.local_slices]
            if part.shape != box.extent:
                raise ValueError(f"a local tensor of shape {tuple(local.shape)} does not hold its {box}")
            known = held[box.logical_slices]
            spread = max(spread, largest((part - value[box.logical_slices])[known]))
            value[box.logical_slices] = part
            held[box.logical_slices] = True
    return LogicalTensor(value, int((~held).sum()), spread)


def largest(tensor: torch.Tensor) -> float:
    """Largest absolute value; 0 of an empty tensor, infinite where anything is not a number."""
    if tensor.numel() == 0:
        return 0.0
    value = tensor.abs().max().item()
    return value if value == value else float("inf")
