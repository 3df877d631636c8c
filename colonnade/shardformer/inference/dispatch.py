"""Watching and answering the single operations of a forward, below autograd: what torch has for that, in one place."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["OperationMode", "tensors_in"]

OperationMode = TorchDispatchMode  # within such a mode, each operation is made by its __torch_dispatch__


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in the arguments or results of an operation."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
