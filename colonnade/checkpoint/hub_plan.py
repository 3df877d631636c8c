"""What a save will do, decided before anything is written: who sends what, and which file gets which tensor. No I/O."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from colonnade.errors import CheckpointError, ConfigError, explain
from colonnade.model.layout import Box, TensorLayout

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Held:
    """What a rank says of a tensor it can send.

    Args:
        names: its state-dict names; several where weights are tied.
        is_parameter: false for a buffer.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    layout: TensorLayout
    is_parameter: bool


@dataclass(frozen=True)
class Source:
    """A rank that has boxes nobody before it has, and the name by which it finds them."""

    rank: int
    name: str
    layout: TensorLayout


@dataclass(frozen=True)
class Gather:
    """One logical tensor, and the ranks it is put together from."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    sources: tuple[Source, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OutputFile:
    """One file: the tensors gathered for it, in this order, and the keys it holds in the end.

    A gathered tensor may be stored as several keys, of which the last ones may go into the next file.
    """

    name: str
    gathers: tuple[Gather, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class SavePlan:
    """The files in the order in which they are written, and the totals that the index states."""

    files: tuple[OutputFile, ...]
    total_size: int
    total_parameters: int


def parse_size(size: int | str) -> int:
    """Bytes meant by a number or by text such as "5GB" (powers of 1000, as in transformers) or "4GiB".

    Raises:
        ConfigError: where it is neither, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size), re.IGNORECASE)
    if isinstance(size, bool) or not match or match[2].upper() not in _UNITS or not float(match[1]):
        raise ConfigError(
            explain(
                f"size_per_shard={size!r} is not a size.",
                [("needs", 'a number of bytes, or text such as "500MB" or "5GB"')],
            )
        )
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))


def plan_gathers(announced: Sequence[Sequence[Held]]) -> list[Gather]:
    """Decide for each logical tensor which ranks send their boxes.

    Args:
        announced: by rank, what it can send, in state-dict order.

    Raises:
        CheckpointError: where the boxes of all ranks do not make up the tensor, or its shape or dtype differs.
    """
    groups = _tied_groups(itertools.chain.from_iterable(announced))
    found: dict[str, list[tuple[int, Held]]] = {}
    for rank, tensors in enumerate(announced):
        for held in tensors:
            found.setdefault(groups[held.names[0]][0], []).append((rank, held))
    return [_plan_gather(tuple(groups[name]), holders) for name, holders in found.items()]


def _tied_groups(tensors: Iterable[Held]) -> dict[str, list[str]]:
    """By name, all names of that tensor: tied on any rank is tied."""
    groups: dict[str, list[str]] = {}
    for held in tensors:
        merged = list(dict.fromkeys(n for name in held.names for n in groups.get(name, [name])))
        groups.update((name, merged) for name in merged)
    return groups


def _plan_gather(names: tuple[str, ...], holders: list[tuple[int, Held]]) -> Gather:
    first = holders[0][1]
    sources: list[Source] = []
    boxes: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for rank, held in holders:
        if (held.layout.shape, held.dtype) != (first.layout.shape, first.dtype):
            raise CheckpointError(
                f"{names[0]} is {first.dtype} of shape {first.layout.shape} on rank {holders[0][0]}, "
                f"but {held.dtype} of shape {held.layout.shape} on rank {rank}."
            )
        new = {(box.logical, box.extent): box for box in held.layout.boxes if math.prod(box.extent)}
        if not new.keys() <= boxes:
            boxes |= new.keys()
            sources.append(Source(rank, held.names[0], held.layout))
    shape = first.layout.shape
    if not covers(shape, [Box(logical, logical, extent) for logical, extent in boxes]):
        raise CheckpointError(
            explain(
                f"the ranks together do not hold all of {names[0]} {shape}.",
                [("found", ", ".join(f"{extent} at {logical}" for logical, extent in sorted(boxes)) or "nothing")],
            )
        )
    return Gather(names, shape, first.dtype, any(held.is_parameter for _, held in holders), tuple(sources))


def covers(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether the boxes, which may overlap, leave no entry of a tensor of this shape out."""
    # Between two neighbouring box edges along every dim a cell is either wholly inside a box or wholly outside.
    cuts = [
        sorted({0, n} | {box.logical[d] for box in boxes} | {box.logical[d] + box.extent[d] for box in boxes})
        for d, n in enumerate(shape)
    ]
    cells = torch.zeros([max(len(c) - 1, 0) for c in cuts], dtype=torch.bool)
    for box in boxes:
        start = [cuts[d].index(box.logical[d]) for d in range(len(shape))]
        stop = [cuts[d].index(box.logical[d] + box.extent[d]) for d in range(len(shape))]
        cells[tuple(slice(a, b) for a, b in zip(start, stop))] = True
    return bool(cells.all())


def plan_files(gathers: Sequence[Gather], stored: Callable[[Gather], dict[str, int]], limit: int | None) -> SavePlan:
    """Deal the tensors out to files, in order; a file is closed when the next key would take it over the limit.

    Args:
        stored: the keys that a gathered tensor is stored as, with their bytes.
        limit: bytes per file, None for one file. A key larger than that gets a file of its own.
    """
    files: list[tuple[list[Gather], list[str]]] = [([], [])]
    filled, total = 0, 0
    for gather, key, nbytes, is_first in _keys_in_order(gathers, stored):
        if limit is not None and filled and filled + nbytes > limit:
            files.append(([], []))
            filled = 0
        if is_first:
            files[-1][0].append(gather)
        files[-1][1].append(key)
        filled += nbytes
        total += nbytes
    names = [WEIGHTS] if len(files) == 1 else [shard_name(i, len(files)) for i in range(len(files))]
    return SavePlan(
        tuple(OutputFile(name, tuple(sends), tuple(keys)) for name, (sends, keys) in zip(names, files)),
        total,
        sum(math.prod(gather.shape) for gather in gathers if gather.is_parameter),
    )


def _keys_in_order(
    gathers: Sequence[Gather], stored: Callable[[Gather], dict[str, int]]
) -> Iterator[tuple[Gather, str, int, bool]]:
    seen: dict[str, str] = {}
    for gather in gathers:
        for position, (key, nbytes) in enumerate(stored(gather).items()):
            if key in seen:
                raise CheckpointError(f"{seen[key]} and {gather.names[0]} would both be stored as {key}.")
            seen[key] = gather.names[0]
            yield gather, key, nbytes, position == 0


def shard_name(index: int, count: int) -> str:
    """Name of file `index`, counted from 0, out of `count`."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
