"""What all parallel layers share: taking over a native module, and cutting a parameter in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.errors import ConfigError, PolicyError, explain
from colonnade.model.layout import Range, TensorLayout, deal, has_layout, layout_of, set_layout, shard_ranges
from colonnade.shardformer.layer.own_forward import computes_as, has_own_forward

Layer = TypeVar("Layer", bound=nn.Module)


def adopt(native: nn.Module, layer: type[Layer], base: type[nn.Module]) -> Layer:
    """A module of class `layer` that takes over everything `native` has: parameters, hooks, attributes, mode.

    Args:
        base: the native class that `layer` stands in for. Where `native` is of a subclass of it (an embedding that
            scales its output, say), the new module is of that subclass too, and its `super().forward` is the layer's.
            Where the subclass computes what `base` does by a forward of its own, the layer's takes that one's place.

    Raises:
        PolicyError: `native` is not a `base`, or its class computes something else by a forward of its own.
    """
    kind = type(native)
    if not isinstance(native, base):
        raise PolicyError(
            explain(
                f"{layer.__name__} replaces a {base.__name__}, and was given a {kind.__name__}.",
                [("try", f"another layer class, or leave the {kind.__name__} out of the policy")],
            )
        )
    own_forward = has_own_forward(native, base)
    if own_forward and not computes_as(native, base):
        raise PolicyError(
            explain(
                f"{layer.__name__} cannot take the place of {kind.__name__}: it multiplies in a forward of its own.",
                [
                    (
                        "rule",
                        f"a subclass of {base.__name__} may change what goes in and out, around super().forward(...)",
                    ),
                    (
                        "try",
                        f"leave it out of the policy, or first replace it by a plain {base.__name__} in preprocess()",
                    ),
                ],
            )
        )
    combined: Any = _combined(layer, kind, base, own_forward)  # type: ignore[arg-type]  # classes are hashable
    module: Layer = layer.__new__(combined)
    module.__dict__.update(native.__dict__)
    return module


@cache
def _combined(layer: type, native: type, base: type, layer_first: bool) -> type:
    if native is base or issubclass(layer, native):
        return layer
    bases = (layer, native) if layer_first else (native, layer)
    return type(native.__name__, bases, {"__module__": layer.__module__})


def shard_parameter(param: nn.Parameter, dim: int, ranges: Sequence[Range], axis: Axis) -> None:
    """Cut a parameter to this rank's ranges along `dim`, in place: the Parameter object stays the same.

    A parameter that is already cut the same way (a tied weight, met for the second time) is left as it is.
    """
    if not isinstance(param, nn.Parameter):
        raise PolicyError(
            explain(
                "a weight that is computed from others (weight norm, pruning, a parametrization) cannot be split.",
                [
                    (
                        "try",
                        "torch.nn.utils.parametrize.remove_parametrizations before boost, or leave the layer out of the policy",
                    )
                ],
            )
        )
    if has_layout(param):
        present = layout_of(param)
        if present.boxes != TensorLayout.split(present.shape, dim, ranges, axis.name).boxes:
            raise PolicyError(
                explain(
                    "one weight is shared by two layers that the policy splits differently.",
                    [
                        ("weight", f"logical shape {present.shape}, local shape {present.local_shape}"),
                        (
                            "rule",
                            "tied layers must be split alike: a vocabulary-parallel embedding takes a "
                            "vocabulary-parallel head, and the reverse",
                        ),
                        ("try", "vocab_embedding(...) and lm_head(...) together, or neither"),
                    ],
                )
            )
        return
    layout = TensorLayout.split(param.shape, dim, ranges, axis.name)
    grad = param.grad
    param.grad = None
    shard = layout.extract(param.data)
    # a graph that is still alive knows the parameter's old shape; torch forgets that only when the dtype changes
    param.data = shard.new_empty(0, dtype=torch.float64 if shard.dtype != torch.float64 else torch.float32)
    param.data = shard
    if grad is not None:
        param.grad = layout.extract(grad)
    set_layout(param, layout)


def ranges_of(
    length: int,
    axis: Axis,
    what: str,
    pieces: int | Sequence[int] = 1,
    units: int | None = None,
    heads: Sequence[int | None] | int | None = None,
) -> list[Range]:
    """This rank's ranges along a dimension of `length`; arguments as of `shard_ranges`.

    Raises:
        ConfigError: some rank of the axis would hold nothing.
    """
    most = most_ranks(length // pieces if isinstance(pieces, int) else min(pieces), units, heads)
    if axis.size > most:
        raise ConfigError(
            explain(
                f"{what} has {most} {'heads' if units else 'entries'} to share out over {axis.size} ranks of {axis.name}.",
                [("needs", "at least one for each rank"), ("try", f"{axis.name}_size={most} or less")],
            )
        )
    return shard_ranges(length, axis.rank, axis.size, pieces, units, heads)


def most_ranks(entries: int, units: int | None, heads: Sequence[int | None] | int | None) -> int:
    """The largest number of ranks on which each holds something of a part with so many entries, blocks and heads."""
    if units is None:
        return entries
    counts = [n for n in (heads if isinstance(heads, Sequence) else [heads]) if n is not None]
    return min(counts) if counts else entries  # blocks that are never cut are held by several ranks


def sizes_of(length: int, axis: Axis) -> list[int]:
    """Extents along a dimension of `length` that the ranks of the axis hold."""
    return [stop - start for start, stop in deal(length, axis.size)]


def gathered_order(held: Sequence[Sequence[Range]]) -> torch.Tensor | None:
    """Positions that bring the joined shares of all ranks to the logical order; None where they are in order already.

    Args:
        held: for each rank what it holds. Of what several hold, the first one's is taken.
    """
    logical = torch.cat([torch.arange(start, stop) for ranges in held for start, stop, _ in ranges])
    order = torch.argsort(logical, stable=True)
    in_order = logical[order]
    first = torch.ones_like(in_order, dtype=torch.bool)
    first[1:] = in_order[1:] != in_order[:-1]
    order = order[first]
    return None if torch.equal(order, torch.arange(len(logical))) else order
