"""What the optimizer steps on under FSDP: plain tensors that share the memory of this rank's part of each parameter.

An optimizer that was handed the DTensors themselves would go through their dispatch for every operation (milliseconds a
layer), could not be fused or mixed with parameters that are no DTensors, and would communicate behind our back wherever it
takes a norm. Where the parameters are split is said by the layouts on these tensors, as everywhere here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from colonnade.cluster.mesh import ParallelMesh
from colonnade.fsdp.gradients import ShardedGradients
from colonnade.model.layout import layout_of, local_of, set_layout
from colonnade.precision.stepped import Stepped, in_place_of_groups, move_state


class LocalShards(Stepped):
    """This rank's part of every DTensor parameter.

    Args:
        optimizer: whose groups hold the DTensor parameters.
        mesh: where they are split.
        gradients: what reduces their gradients.
    """

    def __init__(self, optimizer: Optimizer, mesh: ParallelMesh, gradients: ShardedGradients) -> None:
        super().__init__(optimizer, mesh)
        self.gradients = gradients
        self._local: dict[nn.Parameter, nn.Parameter] = {}

    def local(self, param: nn.Parameter) -> nn.Parameter:
        """The plain tensor for a parameter; the parameter itself where it is not cut."""
        if not isinstance(param, DTensor):
            return param
        data = local_of(param.detach())
        local = self._local.get(param)
        if local is None:
            local = self._local[param] = nn.Parameter(data, requires_grad=param.requires_grad)
            set_layout(local, layout_of(param))
        local.data = data  # FSDP may have moved it: to pad it, or with the model to another device
        return local

    def commit(self) -> None:
        """Nothing to do: the memory is the model's."""

    def refresh(self) -> None:
        """Nothing to do: the memory is the model's."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.gradients.forget()
        super().zero_grad(set_to_none)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        self.gradients.sharding.reshard()
        with self.swapped():
            for param, local in self._local.items():
                local.grad = None if param.grad is None else local_of(param.grad.detach())
            try:
                yield
            finally:
                for local in self._local.values():
                    local.grad = None

    @contextmanager
    def swapped(self) -> Iterator[None]:
        locals_ = [[self.local(p) for p in group["params"]] for group in self.optimizer.param_groups]
        with in_place_of_groups(self.optimizer, locals_):
            for param, local in self._local.items():
                move_state(self.optimizer, param, local)
            try:
                yield
            finally:
                for param, local in self._local.items():
                    move_state(self.optimizer, local, param)
