"""Master weights: the float32 copies that the optimizer steps on while the model computes in 16 bits.

(Mixed precision training, Micikevicius et al. 2018, section 3.1.) The Parameter objects stay those the user gave to
the optimizer. For the duration of a step their storage is the master copy, so that any optimizer works unchanged and
its state belongs to the parameters that the user knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


class MasterWeights:
    """float32 copies of 16-bit parameters.

    Args:
        parameters: those of the optimizer, before they are cast to 16 bits.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.master = {p: p.data.float() for p in parameters if p.is_floating_point()}

    def refresh(self) -> None:
        """Take over the model's weights, after something else has written them (loading a checkpoint)."""
        for param, master in self.master.items():
            master.copy_(param.data)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside the block parameters and gradients are float32; afterwards parameters are the rounded result."""
        working = {p: (p.data, p.grad) for p in self.master}
        for param, (_, grad) in working.items():
            param.grad = None
            param.data = self.master[param]
            param.grad = None if grad is None else grad.float()
        try:
            yield
        finally:
            for param, (data, grad) in working.items():
                param.grad = None
                param.data = data.copy_(self.master[param])
                param.grad = grad
