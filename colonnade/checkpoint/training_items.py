"""What a training checkpoint holds of a model and its optimizer, as this rank has it.

Weights of which the optimizer keeps a float32 copy are saved as that copy: it says more than the 16 bits beside it, which
are its rounding, and any precision can go on from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from colonnade.checkpoint.manifest import Key
from colonnade.checkpoint.model_tensors import check_layout, named_tensors
from colonnade.cluster.mesh import ParallelMesh
from colonnade.errors import CheckpointError
from colonnade.model.layout import local_of
from colonnade.model.pieces import pieces_of
from colonnade.precision.optimizer import ParallelOptimizer
from colonnade.precision.state import Shard

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")  # options that say how, not what, it computes
Names = tuple[str, ...]


@dataclass
class Group:
    """A parameter group of the optimizer: its options, and the names of its parameters."""

    options: dict[str, Any]
    names: list[str]


@dataclass
class Items:
    """What this rank has.

    Args:
        shards: its parts of each tensor.
        names: first name → all names of a tensor.
        numbers: name → key → what the optimizer keeps as one number for a parameter, as `plain_number` gives it.
        groups: the optimizer's.
    """

    shards: dict[Key, list[Shard]] = field(default_factory=dict)
    names: dict[str, Names] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)

    def add(self, key: Key, shard: Shard) -> None:
        self.shards.setdefault(key, []).append(shard)


def items_of(model: nn.Module | None, optimizer: ParallelOptimizer | None, mesh: ParallelMesh) -> Items:
    """All tensors of a model, and what an optimizer keeps.

    Raises:
        CheckpointError: a tensor has no memory, or lies in another way than its layout says.
    """
    items = Items()
    if optimizer is not None:
        _add_optimizer(items, optimizer)
    if model is not None:
        _add_model(items, model, optimizer, mesh)
    return items


def _add_optimizer(items: Items, optimizer: ParallelOptimizer) -> None:
    for state in optimizer.states():
        name = optimizer.names[state.param][0]
        items.names[name] = optimizer.names[state.param]
        for key, shard in state.tensors.items():
            items.add(Key("optimizer", name, key), shard)
        if state.numbers:
            items.numbers[name] = {key: plain_number(value) for key, value in state.numbers.items()}
        if state.master is not None:
            items.add(Key("model", name), state.master)
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        items.groups.append(Group(options, [optimizer.names[p][0] for p in group["params"]]))


def _add_model(items: Items, model: nn.Module, optimizer: ParallelOptimizer | None, mesh: ParallelMesh) -> None:
    elsewhere = set[torch.Tensor]() if optimizer is None else {*optimizer.kept_elsewhere()}
    for names, tensor in named_tensors(model):
        items.names[names[0]] = names
        if tensor in elsewhere:
            continue
        layout = check_layout(names[0], tensor)
        local = local_of(tensor.detach())
        pieces = pieces_of(local, layout, holder_position(mesh, layout.sharded_axes))
        items.add(Key("model", names[0]), Shard(layout.shape, tensor.dtype, pieces, layout.sharded_axes))


def holder_position(mesh: ParallelMesh, axes: Sequence[str]) -> int | None:
    """This rank's position on the axis to which a layout's `holders` belong."""
    return mesh.rank(axes[0]) if axes else None


def targets_of(model: nn.Module) -> tuple[dict[str, Shard], dict[str, Names]]:
    """Where a model's tensors are to be read to, by their first names; and all their names."""
    shards, names = {}, {}
    for of_tensor, tensor in named_tensors(model):
        layout = check_layout(of_tensor[0], tensor)
        local = local_of(tensor.detach())
        shards[of_tensor[0]] = Shard(layout.shape, tensor.dtype, pieces_of(local, layout), layout.sharded_axes)
        names[of_tensor[0]] = of_tensor
    return shards, names


def plain_number(value: Any) -> Any:
    """A number in a form that JSON has: a tensor without dims as its format and its value; see `number_from`.

    Raises:
        CheckpointError: it is no number.
    """
    if isinstance(value, torch.Tensor) and not value.dim():
        return ["tensor", str(value.dtype).removeprefix("torch."), value.item()]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        f"an optimizer keeps {type(value).__name__} {value!r:.60}, which is neither a tensor nor a number."
    )


def number_from(value: Any) -> Any:
    """The number that `plain_number` was given."""
    return torch.tensor(value[2], dtype=getattr(torch, value[1])) if isinstance(value, list) else value


def merge_numbers(of_ranks: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The numbers of all ranks together.

    Raises:
        CheckpointError: ranks that step on parts of one parameter do not agree.
    """
    merged: dict[str, dict[str, Any]] = {}
    for numbers in of_ranks:
        for name, found in numbers.items():
            known = merged.setdefault(name, dict(found))
            if repr(sorted(known.items())) != repr(sorted(found.items())):  # repr: a nan is equal to itself
                raise CheckpointError(f"ranks keep different numbers for {name}: {known} and {found}.")
    return merged


def merge_groups(of_ranks: Iterable[Sequence[Group]]) -> list[Group]:
    """The groups of all ranks together: each stage of a pipeline has some of their parameters.

    Raises:
        CheckpointError: ranks have different numbers of groups.
    """
    merged: list[Group] = []
    for groups in of_ranks:
        if merged and len(groups) != len(merged):
            raise CheckpointError(f"ranks have optimizers of {len(merged)} and of {len(groups)} parameter groups.")
        merged = merged or [Group(group.options, []) for group in groups]
        for known, found in zip(merged, groups):
            known.names = list(dict.fromkeys([*known.names, *found.names]))
    return merged
