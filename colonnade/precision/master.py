"""Master weights: the float32 copies that the optimizer steps on while the model computes in 16 bits.

(Mixed precision training, Micikevicius et al. 2018, section 3.1.) The Parameter objects in the optimizer's groups stay
those the user gave to it, and its state stays theirs. Only for the duration of a step the master weights stand in their
place, so that any optimizer works unchanged. (Giving a parameter float32 storage for the step instead would make torch
forget the hooks by which DistributedDataParallel learns of its gradient.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from colonnade.cluster.mesh import ParallelMesh
from colonnade.model.layout import layout_of, set_layout
from colonnade.precision.state import ParameterState
from colonnade.precision.stepped import Stepped, in_place_of_groups, move_state


class MasterWeights(Stepped):
    """float32 copies of the parameters of an optimizer, taken before these are cast to 16 bits.

    Args:
        optimizer: whose parameters they are for.
        mesh: where parameters are split.
    """

    def __init__(self, optimizer: Optimizer, mesh: ParallelMesh) -> None:
        super().__init__(optimizer, mesh)
        self.master: dict[nn.Parameter, nn.Parameter] = {}
        for param in self.tensors():
            self._add(param)

    def _add(self, param: nn.Parameter) -> None:
        if param.is_floating_point():
            self.master[param] = nn.Parameter(param.data.float(), requires_grad=param.requires_grad)
            set_layout(self.master[param], layout_of(param))

    def refresh(self) -> None:
        for param, master in self.master.items():
            master.data.copy_(param.data)

    def copied(self) -> set[nn.Parameter]:
        return set(self.master)

    def states(self) -> list[ParameterState]:
        for param, master in self.master.items():
            self._follow(param, master)
        return super().states()

    def _follow(self, param: nn.Parameter, master: nn.Parameter) -> None:
        """Take over entries that something else has written into the model since the last step."""
        written = param.data != master.data.to(param.dtype)
        if written.any():
            master.data[written] = param.data[written].float()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        with self.swapped():
            for param, master in self.master.items():
                self._follow(param, master)
                master.grad = None if param.grad is None else param.grad.float()
            try:
                yield
            finally:
                for master in self.master.values():
                    master.grad = None

    def commit(self) -> None:
        for param, master in self.master.items():
            if master.grad is not None:
                param.data.copy_(master.data)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        for param in [p for p in self.tensors() if p not in self.master]:
            self._add(param)  # of a group that was added after boost
        masters = [[self.master.get(p, p) for p in group["params"]] for group in self.optimizer.param_groups]
        with in_place_of_groups(self.optimizer, masters):
            for param, master in self.master.items():
                move_state(self.optimizer, param, master)
            try:
                yield
            finally:
                for param, master in self.master.items():
                    move_state(self.optimizer, master, param)
