"""Batches: counting targets, cutting into micro-batches, putting outputs together again, comparing over ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from colonnade.cluster.mesh import Axis, ParallelMesh
from colonnade.comm.collectives import all_gather_object
from colonnade.errors import ShapeError, UsageError, explain, refuse
from colonnade.model.layout import deal

IGNORED = -100


def tensors_in(value: Any, path: str = "") -> Iterable[tuple[str, torch.Tensor]]:
    """All tensors in nested dicts, lists and tuples, with a path to each."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}.{index}".lstrip("."))


def batch_rows(batch: Any) -> int:
    """Number of rows of a batch: the first dimension of input_ids, or of the first tensor that has one.

    Raises:
        ShapeError: there is no such tensor.
    """
    found = dict(tensors_in(batch))
    for tensor in [found[k] for k in ("input_ids", "inputs_embeds", "pixel_values") if k in found] + list(
        found.values()
    ):
        if tensor.dim():
            return tensor.shape[0]
    raise ShapeError(f"the batch holds no tensor with a batch dimension; it is a {type(batch).__name__}.")


def count_targets(batch: Any, shifted: bool) -> int:
    """Number of labels that count towards the loss; rows where a batch has no labels.

    Args:
        shifted: the model predicts label t + 1 at position t, so the first label of a row does not count.
    """
    labels = batch.get("shift_labels") if isinstance(batch, Mapping) else None
    if labels is None:
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if isinstance(labels, torch.Tensor) and shifted and labels.dim() > 1:
            labels = labels[..., 1:]
    if not isinstance(labels, torch.Tensor):
        return batch_rows(batch)
    return int((labels != IGNORED).sum()) if not labels.is_floating_point() else labels.shape[0]


def split_rows(rows: int, microbatch_size: int | None, num_microbatches: int | None) -> list[tuple[int, int]]:
    """(start, stop) of each micro-batch. The last one may be shorter; fewer rows than micro-batches give fewer of them."""
    if microbatch_size is not None:
        return [(start, min(start + microbatch_size, rows)) for start in range(0, rows, microbatch_size)]
    return deal(rows, min(num_microbatches or 1, max(rows, 1)))


def take_rows(value: Any, rows: int, start: int, stop: int) -> Any:
    """The rows start..stop of every tensor whose first dimension is the batch's; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value[start:stop] if value.dim() and value.shape[0] == rows else value
    if isinstance(value, Mapping):
        return {key: take_rows(item, rows, start, stop) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(take_rows(item, rows, start, stop) for item in value)
    return value


def join_outputs(outputs: list[Any], rows: list[int]) -> Any:
    """Outputs of micro-batches as one: tensors with a batch dimension are joined, the rest is left out.

    Args:
        rows: number of rows of each micro-batch.
    """
    if len(outputs) == 1:
        return outputs[0]
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(outputs) if first.dim() and all(o.shape[0] == n for o, n in zip(outputs, rows)) else None
    if isinstance(first, Mapping):
        joined = {key: join_outputs([o[key] for o in outputs], rows) for key in first}
        return {key: value for key, value in joined.items() if value is not None}
    if isinstance(first, (list, tuple)):
        return tuple(join_outputs([o[i] for o in outputs], rows) for i in range(len(first)))
    return None


def check_microbatching(microbatch_size: int | None, num_microbatches: int | None) -> None:
    """Refuse sizes that are not whole positive numbers, and both at once."""
    refuse(microbatching_problems(microbatch_size, num_microbatches))


def microbatching_problems(microbatch_size: int | None, num_microbatches: int | None) -> list[str]:
    """What is wrong with the sizes of micro-batches, a message for each."""
    found = []
    for name, value in (("microbatch_size", microbatch_size), ("num_microbatches", num_microbatches)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            found.append(f"{name}={value!r} must be a whole number of at least 1.")
    if microbatch_size is not None and num_microbatches is not None:
        rows = [("rule", "one follows from the other"), ("try", "only one of them")]
        found.append(explain("microbatch_size and num_microbatches are both given.", rows))
    return found


GROUPS = {"tp": "tensor-parallel group", "pp": "pipeline"}


def check_same_batch(batch: Any, mesh: ParallelMesh, name: str = "tp") -> None:
    """Compare a batch over the ranks of an axis that must all see the same one.

    Raises:
        ShapeError: on every rank that compares with one that differs, naming the tensors and ranks.
    """
    mine = {path: (tuple(t.shape), str(t.dtype), _digest(t)) for path, t in tensors_in(batch)}
    axis = mesh.axis(name)
    rows = list(_differing(all_gather_object(mine, axis), axis))
    if rows:
        raise ShapeError(
            explain(
                f"the ranks of one {GROUPS[name]} were given different batches (ranks {', '.join(map(str, axis.ranks))}).",
                [*rows, ("try", "plugin.prepare_dataloader, which deals rows out by data-parallel rank")],
            )
        )


def _differing(others: list[dict[str, tuple[Any, ...]]], axis: Axis) -> Iterable[tuple[str, str]]:
    """The tensors that are not the same on all ranks of an axis, as rows of a message."""
    for path in sorted({p for other in others for p in other}):
        seen = [other.get(path) for other in others]
        odd = [axis.ranks[i] for i, value in enumerate(seen) if value != seen[0]]
        if odd:
            there = _describe(seen[axis.ranks.index(odd[0])])
            yield path, f"rank {odd[0]} has {there}, rank {axis.ranks[0]} {_describe(seen[0])}"


def _digest(tensor: torch.Tensor) -> str:
    data = (
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0).cpu()
    )
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=8).hexdigest()


def _describe(value: tuple[Any, ...] | None) -> str:
    return "nothing" if value is None else f"shape {value[0]} with digest {value[2]}"


def next_batch(data_iter: Any) -> Any:
    """The next batch of an iterator.

    Raises:
        UsageError: what was given is no iterator.
    """
    if not hasattr(data_iter, "__next__"):
        raise UsageError(
            explain(
                f"execute_pipeline takes an iterator of batches, and was given a {type(data_iter).__name__}.",
                [("try", "iter(dataloader), made once before the loop; or iter([batch]) for a single batch")],
            )
        )
    return next(data_iter)
