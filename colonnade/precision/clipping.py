"""Clipping of gradients, by the global norm or entry by entry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from colonnade.errors import ConfigError, explain
from colonnade.model.layout import local_of


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped before a step.

    Args:
        max_norm: scale the whole gradient so that its norm over all ranks is at most this; 0 leaves it.
        max_value: cut every entry to at most this size, its sign kept; 0 leaves it.

    Raises:
        ConfigError: a negative number or none at all, or both at once.
    """

    max_norm: float = 0.0
    max_value: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("max_norm", self.max_norm), ("max_value", self.max_value)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ConfigError(f"{name}={value!r} must be a number ≥ 0 (0 switches clipping off).")
        if self.max_norm and self.max_value:
            raise ConfigError(
                explain(
                    f"max_norm={self.max_norm} and max_value={self.max_value} are both given.",
                    [("rule", "the one would change what the other measures"), ("try", "one of them")],
                )
            )

    def apply(self, parameters: Iterable[nn.Parameter], norm: torch.Tensor) -> None:
        """Clip `parameter.grad` in place.

        Args:
            norm: of the gradient over all ranks.
        """
        grads = [local_of(param.grad) for param in parameters if param.grad is not None]
        if not grads:
            return
        if self.max_value:
            torch._foreach_clamp_max_(grads, self.max_value)
            torch._foreach_clamp_min_(grads, -self.max_value)
        factor = float(self.max_norm / (norm + 1e-6)) if self.max_norm else 1.0  # as torch.nn.utils.clip_grad_norm_
        if not factor >= 1:  # of a norm that is no number too: nothing may then be stepped on unclipped
            torch._foreach_mul_(grads, factor)
