"""Says of one sharded module what it has become, why, and what it communicates."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from colonnade.model.layout import TensorLayout, layout_of
from colonnade.shardformer.layer import (
    Conv1D_Col,
    Conv1D_Row,
    DropoutForParallelInput,
    DropoutForReplicatedInput,
    ShardedLayerNorm,
    ShardedNorm,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from colonnade.shardformer.layer.embedding import Embedding1D
from colonnade.shardformer.layer.latent import LatentLinear
from colonnade.shardformer.layer.linear import ColumnParallel, RowParallel
from colonnade.shardformer.roles import HeadNorm, Norm, Replicated
from colonnade.shardformer.shard.plan import Replacement
from colonnade.tools.explain.tree import Traffic


@dataclass(frozen=True)
class Decision:
    """What becomes of a module (`kind`), the reason, and what it communicates in a step."""

    kind: str
    why: str = ""
    traffic: tuple[Traffic, ...] = ()


class Regions:
    """Which column-parallel layers share an entry, read off the sharded model: they have the same Region object.

    Args:
        model: sharded.
        reads: path of a layer → what it reads, where that is known: layers that read other things enter by themselves.
    """

    def __init__(self, model: nn.Module, reads: Mapping[str, Hashable]) -> None:
        self._reads = reads
        self._readers: dict[Any, list[str]] = {}
        for name, module in model.named_modules():
            if isinstance(module, ColumnParallel) and not module.inside:
                self._readers.setdefault(self._entry(name, module), []).append(name)

    def readers(self, name: str, module: ColumnParallel) -> list[str]:
        """Names of the layers that enter with this one, in order; the first is charged for the traffic."""
        return self._readers[self._entry(name, module)]

    def _entry(self, name: str, module: ColumnParallel) -> Hashable:
        return id(module.region), self._reads.get(name)


def decide(name: str, module: Any, replacement: Replacement, size: int, regions: Regions) -> Decision:
    """The decision for a module that the policy replaced.

    Args:
        name: its path in the model.
        module: what stands there now.
        replacement: what the policy said.
        size: number of tensor-parallel ranks.
        regions: of the whole model.
    """
    decision = _decision(name, module, replacement, size, regions)
    return decision if size > 1 else Decision(decision.kind, "one rank: nothing is split")


def _decision(name: str, module: Any, replacement: Replacement, size: int, regions: Regions) -> Decision:
    target = replacement.target
    if isinstance(module, VocabParallelEmbedding1D):
        return _embedding(module)
    if isinstance(module, Embedding1D):
        width = layout_of(module.weight).shape[1]
        gathered = (Traffic("all_gather", "forward", per_token=width),) if module.gather_output else ()
        return Decision("column-parallel embedding", f"{module.weight.shape[1]:,} of {width:,} columns", gathered)
    if isinstance(module, VocabParallelLMHead1D):
        return _head(module, replacement, size)
    if isinstance(module, ColumnParallel):
        return _column(name, module, replacement, regions)
    if isinstance(module, RowParallel):
        return _row(module, replacement)
    if isinstance(module, LatentLinear):
        summed = Traffic("all_reduce", "backward", per_token=layout_of(module.weight).shape[0])
        return Decision(
            "latent", "whole on every rank; the region begins behind it: all heads read its output", (summed,)
        )
    if isinstance(module, (DropoutForParallelInput, DropoutForReplicatedInput)):
        own = isinstance(module, DropoutForParallelInput)
        return Decision(
            "dropout", "its input is split: each rank draws its own mask" if own else "the same mask on all"
        )
    if isinstance(module, ShardedNorm):
        return _split_norm(module, size)
    if isinstance(target, type) and issubclass(target, HeadNorm):
        return Decision("head norm", "inside the region: whole on every rank")
    if isinstance(target, type) and issubclass(target, Norm):
        fused = "" if type(module) is type(replacement.native) else f", as {type(module).__name__}"
        return Decision("norm", f"outside the regions: whole on every rank{fused}")
    if isinstance(target, type) and issubclass(target, Replicated):
        return Decision("replicated", "the policy leaves it whole on every rank")
    return _other(target)


def _column(name: str, module: Any, replacement: Replacement, regions: Regions) -> Decision:
    layout = layout_of(module.weight)
    local, dim = tuple(module.weight.shape), 1 if isinstance(module, Conv1D_Col) else 0
    pieces: Any = replacement.kwargs.get("pieces") or getattr(replacement.target, "PIECES", 1)
    parts = pieces if isinstance(pieces, int) else len(pieces)
    fused = f", {parts} fused parts each by itself" if parts > 1 else ""
    readers = [] if module.inside else regions.readers(name, module)
    names = [path.rpartition(".")[2] for path in readers]
    traffic: list[Traffic] = []
    if module.inside:
        entered = "its input is inside the region already"
    elif readers[0] == name:
        entered = "its input is entered here" if len(names) == 1 else f"its input is entered once, for {_list(names)}"
        traffic.append(Traffic("all_reduce", "backward", per_token=layout.shape[1 - dim]))
    else:
        entered = f"enters with {names[0]}"
    if module.gather_output:
        traffic.append(Traffic("all_gather", "forward", per_token=layout.shape[dim]))
        entered += "; its output is collected on every rank"
    share = f"{local[dim]:,} of {layout.shape[dim]:,} columns{_heads(replacement, layout, dim)}{fused}"
    return Decision("column, fused" if parts > 1 else "column", f"{share}; {entered}", tuple(traffic))


def _row(module: Any, replacement: Replacement) -> Decision:
    layout = layout_of(module.weight)
    local, dim = tuple(module.weight.shape), 0 if isinstance(module, Conv1D_Row) else 1
    share = f"{local[dim]:,} of {layout.shape[dim]:,} rows{_heads(replacement, layout, dim)}"
    bias = "; the bias is added once, after the sum" if getattr(module, "bias", None) is not None else ""
    traffic = [Traffic("all_reduce", "forward", per_token=layout.shape[1 - dim])]
    if not module.parallel_input:
        traffic.append(Traffic("all_gather", "backward", per_token=layout.shape[dim]))
    return Decision("row", f"{share}; leaves the region with the sum over ranks{bias}", tuple(traffic))


def _heads(replacement: Replacement, layout: TensorLayout, dim: int) -> str:
    """This rank's share in heads, or in the blocks that these stand in."""
    units, heads = replacement.kwargs.get("units"), replacement.kwargs.get("heads")
    if not units:
        return ""
    label = replacement.kwargs.get("heads_name", "heads") if heads else replacement.kwargs.get("units_name", "blocks")
    counts = heads if isinstance(heads, (list, tuple)) else [heads] * len(layout.boxes)
    sizes = _sizes(replacement, layout.shape[dim], len(layout.boxes))
    number = max(range(len(counts)), key=lambda i: counts[i] or 0)  # the part with most heads: the queries
    box, size, count = layout.boxes[number], sizes[number], counts[number] or units
    return f" ({box.extent[dim] * count // size} of {count} {label})"


def _sizes(replacement: Replacement, whole: int, parts: int) -> list[int]:
    pieces = replacement.kwargs.get("pieces")
    return list(pieces) if isinstance(pieces, (list, tuple)) else [whole // parts] * parts


def _embedding(module: Any) -> Decision:
    vocabulary, width = layout_of(module.weight).shape
    why = f"{module.weight.shape[0]:,} of {vocabulary:,} rows; each rank looks up its own, and the results are added"
    return Decision("vocabulary-parallel", why, (Traffic("all_reduce", "forward", per_token=width),))


def _head(module: Any, replacement: Replacement, size: int) -> Decision:
    vocabulary, width = layout_of(module.weight).shape
    traffic = [Traffic("all_reduce", "backward", per_token=width)]
    why = f"{module.weight.shape[0]:,} of {vocabulary:,} columns; "
    if module.gather_output:
        asked = replacement.kwargs.get("gather_output")
        why += "its logits are gathered on every rank" if asked else "the model's own loss needs whole logits"
        traffic.append(
            Traffic("all_gather", "forward", per_token=size * module.weight.shape[0])
        )  # padded to the largest
    else:
        why += "the loss is computed from split logits: 3 numbers a token from each rank"
        traffic.append(Traffic("all_gather", "forward", per_token=3 * size))
    return Decision("vocabulary-parallel head", why, tuple(traffic))


def _split_norm(module: Any, size: int) -> Decision:
    why = f"{module.local_width:,} of {module.width:,} entries; normed by a statistic of all ranks' entries"
    if isinstance(module, ShardedLayerNorm):
        return Decision(
            "split norm", why, (Traffic("all_gather", "forward", 2 * size), Traffic("all_reduce", "backward", 2))
        )
    return Decision("split norm", why, (Traffic("all_reduce", "forward", 1), Traffic("all_reduce", "backward", 1)))


def _other(target: Any) -> Decision:
    """A layer or role that is not known here speaks for itself: its docstring's first line, and what it says of traffic."""
    lines = (inspect.getdoc(target) or "").splitlines()
    said = [line.strip() for line in lines[1:] if line.strip().startswith("Traffic:")]
    return Decision(getattr(target, "__name__", str(target)), " ".join([*lines[:1], *said]))


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1]
