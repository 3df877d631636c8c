"""What all parallel layers share: taking over a native module, and cutting a parameter in place."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.errors import ConfigError, PolicyError, explain
from colonnade.model.layout import TensorLayout, deal, has_layout, layout_of, set_layout, shard_ranges

Layer = TypeVar("Layer", bound=nn.Module)


def adopt(native: nn.Module, layer: type[Layer], base: type[nn.Module]) -> Layer:
    """A module of class `layer` that takes over everything `native` has: parameters, hooks, attributes, mode.

    Args:
        base: the native class that `layer` stands in for. Where `native` is of a subclass of it (an embedding that
            scales its output, say), the new module is of that subclass too, and its `super().forward` is the layer's.

    Raises:
        PolicyError: `native` is not a `base`, or its class computes by a forward of its own that never calls the base's.
    """
    forward = inspect.unwrap(type(native).forward)
    if isinstance(native, base) and type(native).forward is not base.forward and not _calls_super(forward):
        raise PolicyError(
            explain(
                f"{layer.__name__} cannot take the place of {type(native).__name__}: it multiplies in a forward of its own.",
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
    if not isinstance(native, base):
        raise PolicyError(
            explain(
                f"{layer.__name__} replaces a {base.__name__}, and was given a {type(native).__name__}.",
                [("try", f"another layer class, or leave the {type(native).__name__} out of the policy")],
            )
        )
    module: Layer = layer.__new__(_combined(layer, type(native), base))  # type: ignore[arg-type]  # classes are hashable
    module.__dict__.update(native.__dict__)
    return module


def _calls_super(forward: Any) -> bool:
    """Whether a method mentions `super`; one that does not cannot reach the class it derives from."""
    return "super" in getattr(getattr(forward, "__code__", None), "co_names", ("super",))


@cache
def _combined(layer: type, native: type, base: type) -> type:
    if native is base or issubclass(layer, native):
        return layer
    return type(native.__name__, (native, layer), {"__module__": layer.__module__})


def shard_parameter(param: nn.Parameter, dim: int, ranges: Sequence[tuple[int, int]], axis: Axis) -> None:
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
    length: int, axis: Axis, what: str, pieces: int | Sequence[int] = 1, units: int | None = None
) -> list[tuple[int, int]]:
    """This rank's ranges along a dimension of `length`, refused where some rank of the axis would hold nothing."""
    parts = pieces if isinstance(pieces, int) else len(pieces)
    blocks = units or length // parts
    if blocks < axis.size:
        raise ConfigError(
            explain(
                f"{what} has {blocks} {'blocks' if units else 'entries'} to share out over {axis.size} ranks of {axis.name}.",
                [("needs", "at least one for each rank"), ("try", f"{axis.name}_size={blocks} or less")],
            )
        )
    return shard_ranges(length, axis.rank, axis.size, pieces, units)


def sizes_of(length: int, axis: Axis) -> list[int]:
    """Extents along a dimension of `length` that the ranks of the axis hold."""
    return [stop - start for start, stop in deal(length, axis.size)]


def gathered_order(length: int, axis: Axis, pieces: int | Sequence[int], units: int | None) -> torch.Tensor | None:
    """Positions that bring the joined outputs of a fused layer back to the logical order; None where they are in order."""
    if (pieces if isinstance(pieces, int) else len(pieces)) == 1:
        return None
    held = [
        torch.arange(start, stop)
        for rank in range(axis.size)
        for start, stop in shard_ranges(length, rank, axis.size, pieces, units)
    ]
    return torch.argsort(torch.cat(held))
