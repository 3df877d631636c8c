"""Which modules of a model become units of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn


def find_units(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of the blocks that can be gathered by themselves; everything else belongs to the unit of the model itself.

    A block that shares a parameter with another module has to be gathered together with it, and a container without a
    forward is never called.

    Args:
        blocks: the repeated blocks, in order; none of them inside another.
    """
    everywhere = _places(model)
    units: list[nn.Module] = []
    for block in dict.fromkeys(blocks):
        inside = _places(block)
        called = type(block).forward is not nn.Module.forward
        if block is not model and inside and called and all(everywhere[p] == n for p, n in inside.items()):
            units.append(block)
    return units


def _places(model: nn.Module) -> Counter[nn.Parameter]:
    """In how many places of distinct modules each parameter is registered."""
    return Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
