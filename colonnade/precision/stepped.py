"""What an optimizer steps on: the model's own parameters, or tensors that stand in for them during a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.cluster.mesh import ParallelMesh
from colonnade.errors import UsageError
from colonnade.precision.grad_norm import GradientParts, gradient_parts
from colonnade.precision.state import ParameterState, SavedState, Shard, new_state, state_of, whole_shard


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

    def copied(self) -> set[nn.Parameter]:
        """The model's parameters of which this optimizer, on some rank, steps on a copy that knows them better."""
        return set()

    def states(self) -> list[ParameterState]:
        """What the optimizer keeps for each parameter of which this rank steps on anything, to be saved.

        Raises:
            CheckpointError: it is not known how a part of it lies over ranks.
        """
        copied, found = self.copied(), []
        with self._pairs() as pairs:
            for group, param, tensor in pairs:
                tensors, numbers = state_of(self.optimizer, group, param, tensor, self.mesh)
                master = whole_shard(param, tensor, self.mesh) if param in copied else None
                if tensors or numbers or master is not None:
                    found.append(ParameterState(param, tensors, numbers, master))
        return found

    def restore(self, saved: Callable[[nn.Parameter], SavedState | None]) -> list[ParameterState]:
        """Forget what the optimizer keeps, and make memory for what was saved.

        Args:
            saved: what there is for one of the model's parameters; None for nothing.

        Returns:
            What is to be filled with values, and copies of weights, whatever was saved for them.
        """
        copied, found = self.copied(), []
        with self._pairs() as pairs:
            for group, param, tensor in pairs:
                old = self.optimizer.state.pop(tensor, {})
                there, targets = saved(param), dict[str, Shard]()
                if there is not None:
                    made = new_state(self.optimizer, group, param, tensor, there, old)
                    self.optimizer.state[tensor], targets = made
                found.append(
                    ParameterState(param, targets, {}, whole_shard(param, tensor) if param in copied else None)
                )
        return found

    @contextmanager
    def _pairs(self) -> Iterator[list[tuple[dict[str, Any], nn.Parameter, nn.Parameter]]]:
        """(group, the model's parameter, what is stepped on); inside the block groups and state are the latter's."""
        own = self.tensors()
        with self.swapped():
            groups = [group for group in self.optimizer.param_groups for _ in group["params"]]
            yield list(zip(groups, own, self.tensors()))

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
