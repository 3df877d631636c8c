"""From the facts of a trace to regions: which layers are split by columns, which by rows, by how many blocks, and why not.

The rules, for one block:
    row       reaches the block's output without another linear layer, and does not itself see what entered the block
    column    one of the nearest linear layers before a row layer; it may feed nothing else
    whole     everything else
What lies between is the inside of the region. Nothing is guessed: a region with something inside that these rules
do not place stays whole, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from colonnade.shardformer.inference.trace import CONTEXT, INPUT, BlockFacts, LinearFacts


@dataclass(frozen=True)
class Region:
    """One region of a block.

    Args:
        columns: its column-parallel layers.
        row: its row-parallel layer.
        units: number of blocks by which it is split (heads, or groups of heads that share keys); None for single entries.
        shared: parameters inside that every rank holds whole, and whose gradient is a sum over ranks.
        sliced: parameters inside with an entry, or a row, for each head.
        reason: why the region stays whole; empty where it is split.
    """

    columns: tuple[LinearFacts, ...]
    row: LinearFacts
    units: int | None = None
    shared: tuple[str, ...] = ()
    sliced: tuple[str, ...] = ()
    reason: str = ""


def regions_of(block: BlockFacts, shapes: Mapping[str, torch.Size]) -> Iterator[Region]:
    """The regions of a block, split or not.

    Args:
        shapes: parameter name → its shape in the model.
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
            yield _judge(Region(columns, row), linears, row_names, shapes)


def _judge(
    region: Region, linears: Mapping[str, LinearFacts], rows: set[str], shapes: Mapping[str, torch.Size]
) -> Region:
    names = {c.path for c in region.columns}
    unknown = region.row.reads - names
    if unknown:
        return _whole(region, f"{region.row.path} also sees {', '.join(sorted(unknown))}")
    for facts in linears.values():
        if facts.path not in rows and facts.reads & names:
            return _whole(region, f"{', '.join(sorted(facts.reads & names))} also feeds {facts.path}")
    heads = [n for c in region.columns for n in c.heads if n]
    units = math.gcd(*heads) if heads else None
    if units is not None:
        for c in region.columns:
            if any(size % units for size in c.pieces):
                return _whole(region, f"{c.path} has parts {c.pieces} that are not {units} equal blocks")
    shared: list[str] = []
    sliced: list[str] = []
    for name in sorted(region.row.parameters):
        place = _place(shapes[name], region, heads)
        if place is None:
            return _whole(region, f"{name} of shape {tuple(shapes[name])} spans what would be split")
        (shared if place == "shared" else sliced).append(name)
    return Region(region.columns, region.row, units, tuple(shared), tuple(sliced))


def _place(shape: torch.Size, region: Region, heads: list[int]) -> str | None:
    """What to do with a parameter inside a region, by its shape."""
    if math.prod(shape) == 1:
        return "shared"
    widths = {size // n for c in region.columns for size, n in zip(c.pieces, c.heads) if n}
    if shape[0] in heads and not (len(shape) == 1 and shape[0] in widths):
        return "sliced"
    if len(shape) == 1 and shape[0] in widths:
        return "shared"
    return None


def _whole(region: Region, reason: str) -> Region:
    return Region(region.columns, region.row, reason=reason)
