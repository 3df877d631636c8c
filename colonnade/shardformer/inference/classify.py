"""From the facts of a trace to regions: which layers are split by columns, which by rows, by how many blocks, and why not.

The rules, for one block:
    row       reaches the block's output without another linear layer, and does not itself see what entered the block
    column    one of the nearest linear layers before a row layer
    latent    would be a column, but feeds another column too: a low-rank stage shared by all heads, left whole
    whole     everything else
What lies between is the inside of the region. Nothing is guessed: a region with something inside that these rules
do not place stays whole, with the reason.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from colonnade.shardformer.inference.probe import TRACED_ROWS
from colonnade.shardformer.inference.trace import CONTEXT, INPUT, BlockFacts, LinearFacts


@dataclass(frozen=True)
class Place:
    """What becomes of a parameter or buffer inside a region.

    Args:
        name: of the parameter in the model.
        kind: whole on every rank, its gradient a sum over ranks; cut along `dim`; or the weight or bias of a norm over
            all that is split.
        heads: into how many heads it is cut, or a norm's width is; None for single entries.
    """

    name: str
    kind: Literal["whole", "cut", "norm"]
    dim: int = 0
    heads: int | None = None


@dataclass(frozen=True)
class Argument:
    """A tensor with an entry for each head, with which a module of the region is called.

    Args:
        dim: along which it is cut.
        folded: heads are folded into the rows: the dimension is rows × heads.
    """

    module: str
    name: str
    dim: int
    heads: int
    folded: bool = False


@dataclass(frozen=True)
class Region:
    """One region of a block.

    Args:
        columns: its column-parallel layers.
        row: its row-parallel layer.
        latents: layers before some of the columns that stay whole; what they feed is inside.
        units: number of blocks by which it is split: heads, or groups of heads that share keys; None for single entries.
        heads: number of query heads; None where they are no other than the units.
        queries: number of query heads in all, where each block is viewed as a whole: its queries, key and value.
        places: parameters and buffers inside.
        arguments: tensors from outside with an entry for each head.
        reason: why the region stays whole; empty where it is split.
    """

    columns: tuple[LinearFacts, ...]
    row: LinearFacts
    latents: tuple[LinearFacts, ...] = ()
    units: int | None = None
    heads: int | None = None
    queries: int | None = None
    places: tuple[Place, ...] = ()
    arguments: tuple[Argument, ...] = ()
    reason: str = ""

    @property
    def pattern(self) -> str:
        """Its row-parallel layer with block numbers left open: the same for the same region of every block."""
        return re.sub(r"\.\d+(?=\.)", ".*", self.row.path)

    @property
    def owner(self) -> str:
        """Path of the innermost module that all its columns are in."""
        levels = zip(*(c.path.split(".")[:-1] for c in self.columns))
        return ".".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels))

    def heads_of(self, column: LinearFacts) -> tuple[int | None, ...] | None:
        """For each part of a column's output into how many heads its blocks may be cut; None where none need be."""
        if self.units is None or self.heads is None:
            return None
        counts = zip(column.pieces, column.heads)
        fine = tuple((n or self._hidden_heads(size)) for size, n in counts)
        return tuple(n if n > self.units else None for n in fine) if max(fine) > self.units else None

    def _hidden_heads(self, size: int) -> int:
        """How many heads a part has that is not viewed as heads: one, such as a shared key, or as many as there are."""
        width = self.head_width
        one = size in (width, 2 * width) or size % (self.heads or 1)
        return 1 if one else self.heads or 1

    @property
    def head_width(self) -> int:
        """Extent of a query head; 0 where there are no heads."""
        sizes = [(n, size // n) for c in self.columns for size, n in zip(c.pieces, c.heads) if n]
        return max(sizes, default=(0, 0))[1]


def regions_of(block: BlockFacts, model: nn.Module) -> Iterator[Region]:
    """The regions of a block, split or not.

    Args:
        model: the model that was traced.
    """
    outside = {INPUT, CONTEXT}
    linears = block.linears
    rows = [
        f for f in linears.values() if f.path in block.leaves_by and not f.reads & outside and f.reads & linears.keys()
    ]
    row_names = {row.path for row in rows}
    for row in rows:
        columns = tuple(linears[name] for name in linears if name in row.reads and name not in row_names)
        if columns:
            yield _Judge(Region(columns, row), block, row_names, model).judge()


class _Judge:
    """Decides on one region."""

    def __init__(self, region: Region, block: BlockFacts, rows: set[str], model: nn.Module) -> None:
        self.region, self.block, self.rows, self.model = region, block, rows, model
        self.parameters = dict(model.named_parameters())

    def judge(self) -> Region:
        for step in (self._latents, self._units, self._places, self._arguments):
            reason = step()
            if reason:
                return replace(self.region, reason=reason)
        return self.region

    def _latents(self) -> str:
        """Columns that feed other columns stay whole; a column that feeds anything else makes the region whole."""
        columns = {c.path: c for c in self.region.columns}
        unknown = self.region.row.reads - columns.keys()
        if unknown:
            return f"{self.region.row.path} also sees {', '.join(sorted(unknown))}"
        latents: set[str] = set()
        for facts in self.block.linears.values():
            fed_by = facts.reads & columns.keys()
            if facts.path in self.rows or not fed_by:
                continue
            if facts.path not in columns:
                return f"{', '.join(sorted(fed_by))} also feeds {facts.path}"
            if facts.reads - fed_by:
                return f"{facts.path} sees more than {', '.join(sorted(fed_by))}"
            latents |= fed_by
        if any(columns[name].reads & latents for name in latents):
            return f"{', '.join(sorted(latents))} feed each other"
        self.region = replace(
            self.region,
            columns=tuple(c for c in self.region.columns if c.path not in latents),
            latents=tuple(columns[name] for name in sorted(latents)),
        )
        return "" if self.region.columns else "no layer is left to be split"

    def _units(self) -> str:
        """By how many blocks, and into how many heads these may be cut."""
        columns = self.region.columns
        counts = {n for c in columns for n in c.heads if n}
        if not counts:
            return ""
        units, heads = math.gcd(*counts), max(counts)
        width = self.region.head_width
        if any(size in (width, 2 * width) for c in columns for size, n in zip(c.pieces, c.heads) if not n):
            units = 1  # a part that is not viewed as heads, as it is one: the key, the value or both, shared by all
        for c in columns:
            if any(size % (n or units) or n % units for size, n in zip(c.pieces, c.heads)):
                return f"{c.path} has parts {c.pieces} that are not {units} equal blocks"
        self.region = replace(self.region, units=units, heads=heads if heads > units else None)
        if self.region.heads is None:
            width, inner = self._width(self.region.row.path), {n for c in columns for n in c.inner}
            several = {width // n for n in inner if width % n == 0 and width // n > units and (width // n) % units == 0}
            if len(columns) == len(several) == 1:
                self.region = replace(self.region, queries=several.pop())
        return ""

    def _places(self) -> str:
        region, places = self.region, []
        after_latents = {
            name for c in region.columns if c.reads & {f.path for f in region.latents} for name in c.parameters
        }
        for name in sorted(after_latents - region.row.parameters):
            places.append(Place(name, "whole"))
        for name in sorted(region.row.parameters):
            place = self._place(name, self.parameters[name].shape)
            if place is None:
                return f"{name} of shape {tuple(self.parameters[name].shape)} spans what would be split"
            places.append(place)
        for name, buffer in self.model.get_submodule(region.owner).named_buffers(region.owner):
            if region.units is not None and buffer.dim() and buffer.shape[0] == self._finest:
                places.append(Place(name, "cut", heads=self._finest))
        self.region = replace(region, places=tuple(places))
        return ""

    @property
    def _finest(self) -> int:
        return self.region.queries or self.region.heads or self.region.units or 0

    def _place(self, name: str, shape: torch.Size) -> Place | None:
        """What becomes of a parameter inside, by its shape."""
        region = self.region
        counts = {region.units, self._finest} - {None, 0, 1}
        inner = set[int]().union(*(c.inner for c in region.columns))
        module = self.model.get_submodule(name.rpartition(".")[0])
        # as wide as a head; so may one entry for each head be, by chance: sinks of as many heads as a head is wide
        each_head = len(shape) == 1 and shape[0] in inner and (shape[0] not in counts or _is_norm(module))
        if math.prod(shape) == 1 or each_head:
            return Place(name, "whole")
        for dim, size in enumerate(shape[:2]):  # one for each head, or a table of them
            if size in counts:
                return Place(name, "cut", dim, heads=size)
        widths = {size: n or None for c in region.columns for size, n in zip(c.pieces, c.heads)}
        widths.setdefault(self._width(region.row.path), self._finest or None)
        if not widths.keys() & set(shape):
            return Place(name, "whole")
        if len(shape) == 1:
            return Place(name, "norm" if _is_norm(module) else "cut", heads=widths[shape[0]])
        return None

    def _width(self, path: str) -> int:
        """Width of a linear layer's input."""
        layer: Any = self.model.get_submodule(path)
        return layer.weight.shape[0 if hasattr(layer, "nf") else 1]

    def _arguments(self) -> str:
        """Tensors with an entry for each head: [.., heads, .., ..], or [rows × heads, .., ..]."""
        region, heads = self.region, self._finest
        if not heads:
            return ""
        found = []
        stream = next(iter(inspect.signature(self.model.get_submodule(region.owner).forward).parameters), "")
        for name, shape in self.block.arguments.get(region.owner, {}).items():
            if len(shape) < 3 or heads == 1 or name == stream or "states" in name:  # the last are what the columns read
                continue
            if shape[0] == TRACED_ROWS * heads:
                found.append(Argument(region.owner, name, 0, heads, folded=True))
            elif heads in shape[:-2]:
                found.append(Argument(region.owner, name, shape.index(heads), heads))
        self.region = replace(region, arguments=tuple(found))
        return ""


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()
