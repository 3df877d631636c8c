"""Master weights: the float32 copies that the optimizer steps on while the model computes in 16 bits.

(Mixed precision training, Micikevicius et al. 2018, section 3.1.) The Parameter objects in the optimizer's groups stay
those the user gave to it, and its state stays theirs. Only for the duration of a step the master weights stand in their
place, so that any optimizer works unchanged. (Giving a parameter float32 storage for the step instead would make torch
forget the hooks by which DistributedDataParallel learns of its gradient.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.model.layout import layout_of, set_layout


class MasterWeights:
    """float32 copies of the parameters of an optimizer, taken before these are cast to 16 bits.

    Args:
        optimizer: whose parameters they are for; None for an optimizer that steps on the parameters themselves.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self.optimizer = optimizer
        self.master: dict[nn.Parameter, nn.Parameter] = {}
        groups = [] if optimizer is None else optimizer.param_groups
        for param in (p for group in groups for p in group["params"]):
            self._add(param)

    def _add(self, param: nn.Parameter) -> None:
        if param.is_floating_point():
            self.master[param] = nn.Parameter(param.data.float(), requires_grad=param.requires_grad)
            set_layout(self.master[param], layout_of(param))

    def refresh(self) -> None:
        """Take over the model's weights, after something else has written them (loading a checkpoint)."""
        for param, master in self.master.items():
            master.data.copy_(param.data)

    def _follow(self, param: nn.Parameter, master: nn.Parameter) -> None:
        """Take over entries that something else has written into the model since the last step."""
        written = param.data != master.data.to(param.dtype)
        if written.any():
            master.data[written] = param.data[written].float()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside the block the optimizer holds the master weights and their gradients; afterwards the model is updated."""
        with self.swapped():
            for param, master in self.master.items():
                self._follow(param, master)
                master.grad = None if param.grad is None else param.grad.float()
            try:
                yield
            finally:
                for param, master in self.master.items():
                    if master.grad is not None:
                        param.data.copy_(master.data)
                        master.grad = None

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside the block the master weights stand in the optimizer's groups, and its state is theirs."""
        if self.optimizer is None:
            yield
            return
        optimizer = self.optimizer
        working = [group["params"] for group in optimizer.param_groups]
        for param in (p for params in working for p in params if p not in self.master):
            self._add(param)  # of a group that was added after boost
        for group, params in zip(optimizer.param_groups, working):
            group["params"] = [self.master.get(p, p) for p in params]
        for param, master in self.master.items():
            _move_state(optimizer, param, master)
        try:
            yield
        finally:
            for group, params in zip(optimizer.param_groups, working):
                group["params"] = params
            for param, master in self.master.items():
                _move_state(optimizer, master, param)


def _move_state(optimizer: Optimizer, source: torch.Tensor, target: torch.Tensor) -> None:
    if source in optimizer.state:
        optimizer.state[target] = optimizer.state.pop(source)
