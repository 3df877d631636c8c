"""The base of the optimizers whose update looks at a whole parameter: alone on one device, or split over ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from colonnade.cluster.mesh import AXES, ParallelMesh
from colonnade.comm.collectives import all_gather_object, broadcast
from colonnade.errors import ConfigError, UsageError, explain
from colonnade.model.layout import TensorLayout, layout_of
from colonnade.optim.placement import Placement, fit


@dataclass(frozen=True)
class Item:
    """A parameter that is updated in this step.

    Args:
        value: this rank's tensor of the parameter; written in place.
        grad: its gradient, in float32 or finer.
        state: the parameter's state.
        group: the options of its group.
    """

    value: torch.Tensor
    grad: torch.Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    placement: Placement

    def count(self) -> int:
        """Advance the parameter's own step count, and return it."""
        self.state.setdefault("step", torch.zeros(()))
        self.state["step"] += 1
        return int(self.state["step"])

    def moment(self, key: str) -> torch.Tensor:
        """A state tensor of the local shape, zero at first."""
        if key not in self.state:
            self.state[key] = torch.zeros_like(self.grad)
        return self.state[key]

    def statistic(self, key: str, dim: int) -> torch.Tensor:
        """A state tensor reduced along `dim`, for what this rank holds of the others; zero at first."""
        if key not in self.state:
            self.state[key] = self.placement.zeros(dim, like=self.grad)
        self.state[key] = fit(self.state[key], self.placement.statistic(dim))
        return self.state[key]

    def wide(self) -> torch.Tensor:
        """The parameter in the format of the computation."""
        return widen(self.value)

    @property
    def is_matrix(self) -> bool:
        """Whether the logical parameter has rows and columns."""
        return len(self.placement.shape) > 1


class WholeParameterOptimizer(Optimizer):
    """An optimizer whose update of a parameter depends on all of its entries.

    Without a mesh it is an ordinary single-device optimizer. With one, a parameter whose layout says that ranks hold
    different boxes of it is updated as one process would update the logical parameter. Parameters without a gradient are
    left alone; each counts its own steps. State is float32, or float64 for float64 parameters.

    Traffic: at the first step of a parameter its layout is exchanged, an all-gather of objects over each axis that splits
        parameters. What a step communicates is said by each optimizer.
    """

    elementwise = False
    statistics: Mapping[str, int] = {}  # state that is reduced along a dim: its key, and the dim as a negative number
    batch_elements = 1 << 26  # logical entries updated together: bounds the memory for updates that wait for a sum
    mesh: ParallelMesh | None = None
    _placements: WeakTensorKeyDictionary | None = None

    def set_mesh(self, mesh: ParallelMesh) -> None:
        """Say where parameters are split; called when the optimizer is boosted, on all ranks."""
        self.mesh, self._placements = mesh, None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss and its gradients anew.

        Raises:
            UsageError: a gradient is sparse, or parameters are split and the mesh is not known.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            found = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
            placements = self._place([param for param, _ in found])
            for batch in _batches(placements, self.batch_elements):
                self.update([self._item(*found[i], placements[i]) for i in batch])
        return loss

    @abstractmethod
    def update(self, items: list[Item]) -> None:
        """Update the given parameters, of all groups."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; state keeps its format, also beside 16-bit parameters."""
        super().load_state_dict(state_dict)
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for param, key in zip(params, keys):
            for name, value in state_dict["state"].get(key, {}).items():
                loaded = self.state[param].get(name)
                if isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                    self.state[param][name] = value.to(loaded.device, copy=True)

    def keeps_reduced(self, group: Mapping[str, Any], key: str) -> bool:
        """Whether a state has fewer entries than its parameter; then a whole one is cut when it is next used."""
        return key in self.statistics

    def state_layout(self, tensor: torch.Tensor, group: Mapping[str, Any], key: str) -> TensorLayout | None:
        """How such a state lies in the logical one; None where nothing has been cut yet, and it is whole.

        Args:
            tensor: the parameter, or what stands for it.
        """
        placement = None if self._placements is None else self._placements.get(tensor)
        return None if placement is None else self._layout_of(tensor, placement, group, key)

    def _layout_of(
        self, tensor: torch.Tensor, placement: Placement, group: Mapping[str, Any], key: str
    ) -> TensorLayout:
        return placement.statistic(self.statistics[key])

    def on_whole(
        self,
        items: Sequence[Item],
        local: Callable[[Item], torch.Tensor],
        compute: Callable[[Item, torch.Tensor], torch.Tensor],
        shape: Callable[[Item], Sequence[int]],
    ) -> Iterator[tuple[Item, torch.Tensor]]:
        """Compute something of each logical tensor; tensors that are split are dealt out to the ranks that hold them.

        Over an axis of n ranks, n tensors are gathered, each rank computes on one, and the results are broadcast. What
        ranks hold whole, each computes by itself.

        Args:
            local: this rank's boxes of the tensor.
            compute: takes the logical tensor; a float tensor of its format.
            shape: of what `compute` returns.

        Yields:
            each item and what was computed of its tensor, in an order that all ranks share.

        Traffic: for each split tensor an all-gather over its axes, and a broadcast of what was computed of it.
        """
        by_axes: dict[tuple[str, ...], list[Item]] = {}
        for item in items:
            by_axes.setdefault(tuple(axis.name for axis in item.placement.axes), []).append(item)
        for item in by_axes.pop((), []):
            yield item, compute(item, local(item))
        for _, split in sorted(by_axes.items()):
            axis = split[0].placement.axes[-1]
            for first in range(0, len(split), axis.size):
                dealt = split[first : first + axis.size]
                mine: torch.Tensor | None = None
                for owner, item in enumerate(dealt):
                    whole = item.placement.gather(local(item))
                    mine = whole if owner == axis.rank else mine
                result = None if mine is None else compute(dealt[axis.rank], mine).contiguous()
                for owner, item in enumerate(dealt):
                    own = result if owner == axis.rank else None
                    yield item, broadcast(item.grad.new_empty(*shape(item)) if own is None else own, axis, owner)

    def _item(self, param: torch.Tensor, group: dict[str, Any], placement: Placement) -> Item:
        grad = param.grad
        if grad is None or grad.is_sparse:
            raise UsageError(
                f"{type(self).__name__} does not take sparse gradients; build the embedding with sparse=False."
            )
        return Item(_local(param), widen(_local(grad)), self.state[param], group, placement)

    def _place(self, params: Sequence[torch.Tensor]) -> list[Placement]:
        """Where each parameter lies; what is not yet known is asked of the other ranks."""
        if self._placements is None:
            self._placements = WeakTensorKeyDictionary()
        known = self._placements
        new = [param for param in params if param not in known]
        layouts = [layout_of(param) for param in new]
        for param, layout in zip(new, layouts):
            self._check(param, layout)
        for param, placement in zip(new, self._exchange_layouts(layouts)):
            known[param] = placement
        return [known[param] for param in params]

    def _exchange_layouts(self, layouts: list[TensorLayout]) -> list[Placement]:
        of_ranks, positions = [[layout] for layout in layouts], [0] * len(layouts)
        for name in AXES:
            split = [i for i, layout in enumerate(layouts) if name in layout.sharded_axes]
            if not split or self.mesh is None or self.mesh.size(name) == 1:
                continue
            axis = self.mesh.axis(name)
            gathered = all_gather_object([of_ranks[i] for i in split], axis)
            for i, found in zip(split, zip(*gathered)):
                positions[i] += axis.rank * len(of_ranks[i])
                of_ranks[i] = list(chain.from_iterable(found))
        return [
            Placement(found, position, tuple(self.mesh.axis(a) for a in AXES if self._splits(a, layout)))  # type: ignore[union-attr]
            for layout, found, position in zip(layouts, of_ranks, positions)
        ]

    def _splits(self, axis: str, layout: TensorLayout) -> bool:
        return axis in layout.sharded_axes and self.mesh is not None and self.mesh.size(axis) > 1

    def _check(self, param: torch.Tensor, layout: TensorLayout) -> None:
        name = f"{type(self).__name__} was given a parameter of shape {layout.shape}"
        if layout.sharded_axes and self.mesh is None:
            raise UsageError(
                explain(
                    f"{name} that is split over {', '.join(layout.sharded_axes)}, and does not know the mesh.",
                    [("try", "booster.boost(model, optimizer), or optimizer.set_mesh(mesh) before the first step")],
                )
            )
        found, expected = tuple(_local(param).shape), layout.local_shape
        if found != expected and (found + expected).count(0) == 0:
            raise UsageError(f"{name}; this rank's part has shape {found}, where its layout says {expected}.")


def check_options(optimizer: str, **ranges: tuple[Any, bool, str]) -> None:
    """Refuse options out of range, all at once.

    Args:
        ranges: by option, the value given, whether it is right, and what is right.
    """
    wrong = [(name, value, rule) for name, (value, right, rule) in ranges.items() if not right]
    if wrong:
        given = ", ".join(f"{name}={value!r}" for name, value, _ in wrong)
        raise ConfigError(
            explain(f"{optimizer} cannot work with {given}.", [("needs", f"{n} {rule}") for n, _, rule in wrong])
        )


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32, or in float64 if it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _batches(placements: Sequence[Placement], elements: int) -> Iterator[list[int]]:
    """Cut a list of parameters where the logical entries get too many; the same cuts on all ranks."""
    batch: list[int] = []
    for i, placement in enumerate(placements):
        if batch and sum(placements[j].numel for j in batch) + placement.numel > elements:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
