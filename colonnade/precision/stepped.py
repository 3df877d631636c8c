"""What an optimizer steps on: the model's own parameters, or tensors that stand in for them during a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.cluster.mesh import ParallelMesh
from colonnade.errors import UsageError
from colonnade.precision.grad_norm import GradientParts, gradient_parts


class Stepped(ABC):
    """The tensors that an optimizer steps on.

    The user's Parameters stay in the optimizer's groups; what is stepped on stands there only inside `swapped`.

    Args:
        optimizer: the user's.
        mesh: where parameters are split.
    """

    def __init__(self, optimizer: Optimizer, mesh: ParallelMesh) -> None:
        self.optimizer, self.mesh = optimizer, mesh

    @abstractmethod
    def swapped(self) -> AbstractContextManager[None]:
        """Inside the block the optimizer's groups hold what is stepped on, and its state is theirs."""

    @abstractmethod
    def stepping(self) -> AbstractContextManager[None]:
        """As `swapped`, with the step's gradients in place."""

    @abstractmethod
    def commit(self) -> None:
        """Give the model the new weights; after the optimizer's step, while stepping."""

    def gradient_parts(self) -> GradientParts:
        """The entries of the gradient that this rank counts in the norm, by the axes that split them; while stepping."""
        return gradient_parts(self.tensors(), self.mesh)

    def tensors(self) -> list[nn.Parameter]:
        """What the groups hold."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the accumulated gradients."""
        self.optimizer.zero_grad(set_to_none)

    def cuts(self) -> Any:
        """How what is stepped on is cut, where that can change; None where it cannot."""
        return None

    def cut_as(self, cuts: Any) -> None:
        """Cut it as it was when its state was saved.

        Raises:
            UsageError: nothing is cut here; the state is of ZeRO.
        """
        raise UsageError(
            "this state of an optimizer was taken under ZeRO, which steps on other tensors; load it there."
        )

    @abstractmethod
    def refresh(self) -> None:
        """Take over the model's weights, after something else has written them (loading a checkpoint)."""


class OwnParameters(Stepped):
    """The optimizer steps on the model's parameters themselves."""

    def swapped(self) -> AbstractContextManager[None]:
        return nullcontext()

    def stepping(self) -> AbstractContextManager[None]:
        return nullcontext()

    def commit(self) -> None:
        """Nothing to do: the model's weights are what has been stepped on."""

    def refresh(self) -> None:
        """Nothing to do: there are no copies."""


def move_state(optimizer: Optimizer, source: torch.Tensor, target: torch.Tensor) -> None:
    """Hand the optimizer's state of one tensor to another."""
    if source in optimizer.state:
        optimizer.state[target] = optimizer.state.pop(source)


@contextmanager
def in_place_of_groups(optimizer: Optimizer, tensors: list[list[nn.Parameter]]) -> Iterator[None]:
    """Inside the block the optimizer's groups hold these tensors."""
    own = [group["params"] for group in optimizer.param_groups]
    for group, params in zip(optimizer.param_groups, tensors):
        group["params"] = params
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, own):
            group["params"] = params
