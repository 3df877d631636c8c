"""FlatShards: the optimizer steps on what this rank owns, and the model gets the parts of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colonnade.cluster.mesh import ParallelMesh
from colonnade.comm.buffers import BufferPool
from colonnade.comm.collectives import gather_in_place_start, wait
from colonnade.errors import UsageError, explain
from colonnade.model.layout import layout_of
from colonnade.precision.grad_norm import Axes, GradientParts
from colonnade.precision.optimizer import steps_on_any_part
from colonnade.precision.state import ParameterState, SavedState, State
from colonnade.precision.stepped import Stepped, in_place_of_groups
from colonnade.zero.bucket import ShardBucket
from colonnade.zero.options import ZeroOptions
from colonnade.zero.plan import plan_storages
from colonnade.zero.reducer import ShardReducer
from colonnade.zero.storage import Piece, Storage
from colonnade.zero.units import Unit, joined_state, saved_kind, state_kind

Values = dict[nn.Parameter, torch.Tensor]


def _check_states(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse states that have been dealt out already.

    Raises:
        UsageError: the optimizer has stepped under ZeRO before.
    """
    own = set(model.parameters())
    if any(isinstance(key, torch.Tensor) and key not in own for key in optimizer.state):
        raise UsageError(
            explain(
                f"this {type(optimizer).__name__} has states that are not of the model's parameters.",
                [
                    ("reason", "it was boosted with ZeRO before, which deals states out over the ranks"),
                    ("try", "a new optimizer made from model.parameters()"),
                ],
            )
        )


class FlatShards(Stepped):
    """Moves the parameters of an optimizer into flat storages and deals gradients and states out over the dp ranks.

    (ZeRO: memory optimizations toward training trillion parameter models, Rajbhandari et al. 2020, sections 5.1 and 5.2.)

    Args:
        optimizer: the user's; any that treats entries by themselves steps on flat tensors, others on whole parameters.
        model: whose parameters they are; they become views of the storages.
        mesh: the data-parallel ranks, and where parameters are split.
        stage: 1 deals out states; 2 gradients too.
        dtype: format of the model. Where it is not float32, what is stepped on are float32 copies of the weights as they
            are now.
        options: how gradients travel and where states live.

    Attributes:
        reducer: averages the gradients.
        units: what is stepped on, by parameter group; see [Note: units and unused parameters].

    Traffic of a step beside the reducer's: one all-gather of every element.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        mesh: ParallelMesh,
        stage: int,
        dtype: torch.dtype,
        options: ZeroOptions,
    ) -> None:
        super().__init__(optimizer, mesh)
        _check_states(optimizer, model)
        self.axis, self.offload = mesh.axis("dp"), options.cpu_offload
        self.copies = dtype != torch.float32 or options.cpu_offload
        self.storages: list[Storage] = []
        self.units: list[list[Unit]] = [[] for _ in optimizer.param_groups]
        order = {param: index for index, param in enumerate(model.parameters())}
        groups = [group["params"] for group in optimizer.param_groups]
        whole, pool, buckets = not steps_on_any_part(optimizer), BufferPool(), []
        for plan in plan_storages(groups, order, self.axis.size, options.bucket_bytes, dtype.itemsize, whole):
            exact = {place.param: place.param.data for place in plan.places}  # before they are rounded
            storage = Storage(plan, dtype)
            self.storages.append(storage)
            for part in plan.buckets:
                bucket = ShardBucket(storage, part, self.axis, pool, stage == 1, options.communication_dtype)
                buckets.append(bucket)
                self.units[plan.group] += self._units_of(bucket, exact)
        for param in order:
            optimizer.state.pop(param, None)  # it has been handed on to the units
        self._classes = {("dp", *layout_of(param).sharded_axes) for bucket in buckets for param in bucket.params}
        self.reducer = ShardReducer(buckets, self.axis, options.overlap_communication)

    def _units_of(self, bucket: ShardBucket, exact: Values) -> list[Unit]:
        """Units for this rank's part of a bucket; as few as the states allow that the optimizer has already."""
        start, stop = bucket.plan.part(self.axis.rank)
        states: dict[nn.Parameter, State] = {param: self.optimizer.state.get(param, {}) for param in bucket.params}
        units = []
        for _, run in groupby(bucket.storage.pieces(start, stop), lambda piece: self._run(piece, bucket, states)):
            pieces = [piece._replace(offset=piece.offset + start) for piece in run]
            unit = Unit(bucket, pieces, self._tensor_for(bucket, pieces, exact))
            units.append(unit)
            state = states[pieces[0].param]
            if state:
                self.optimizer.state[unit.tensor] = (
                    state if bucket.storage.plan.whole else joined_state(pieces, states, unit.tensor)
                )
        return units

    def _run(self, piece: Piece, bucket: ShardBucket, states: dict[nn.Parameter, State]) -> object:
        """Neighbours for which this is the same make up one unit."""
        return piece.offset if bucket.storage.plan.whole else state_kind(states[piece.param], piece.param)

    def _tensor_for(self, bucket: ShardBucket, pieces: list[Piece], exact: Values) -> nn.Parameter:
        start, stop = pieces[0].offset, pieces[-1].there.stop
        if self.copies:
            device = torch.device("cpu") if self.offload else bucket.storage.flat.device
            values = torch.zeros(stop - start, device=device)
            for piece in pieces:
                values[piece.offset - start : piece.there.stop - start].copy_(piece.of(exact[piece.param]))
        else:
            values = bucket.storage.flat[start:stop]
        return nn.Parameter(values.view(pieces[0].param.shape) if bucket.storage.plan.whole else values)

    def gradient_parts(self) -> GradientParts:
        parts: dict[Axes, list[torch.Tensor]] = {axes: [] for axes in self._classes}
        for unit in self._all_units():
            for axes, grads in unit.counted(self.mesh):
                parts[axes] += grads
        return parts

    def _all_units(self) -> list[Unit]:
        return [unit for units in self.units for unit in units]

    @contextmanager
    def swapped(self) -> Iterator[None]:
        tensors = [[unit.tensor for unit in units] for units in self.units]
        with in_place_of_groups(self.optimizer, tensors):
            yield

    @contextmanager
    def stepping(self) -> Iterator[None]:
        for storage in self.storages:
            storage.attach()
        used = self.reducer.to_step
        self._cut_where_differs(used)
        with self.swapped():
            for unit in self._all_units():
                if self.copies:
                    self._follow(unit)
                unit.tensor.grad = unit.gradient() if unit.params <= used else None
            try:
                yield
            finally:
                for unit in self._all_units():
                    unit.tensor.grad = None

    def copied(self) -> set[nn.Parameter]:
        return {place.param for s in self.storages for place in s.plan.places} if self.copies else set()

    def states(self) -> list[ParameterState]:
        found = []
        for group, unit in self._with_groups():
            if self.copies:
                self._follow(unit)
            found += unit.states(self.optimizer, group, self.mesh, self.copies)
        return found

    def restore(self, saved: Callable[[nn.Parameter], SavedState | None]) -> list[ParameterState]:
        there = {param: saved(param) for unit in self._all_units() for param in unit.params}
        kinds = {param: saved_kind(state) for param, state in there.items()}
        self._cut(lambda unit, piece: kinds[piece.param])
        found = []
        for group, unit in self._with_groups():
            state, targets = unit.restored(self.optimizer, group, there[unit.pieces[0].param], self.copies)
            if state:
                self.optimizer.state[unit.tensor] = state
            found += targets
        return found

    def _with_groups(self) -> list[tuple[dict[str, Any], Unit]]:
        pairs = zip(self.optimizer.param_groups, self.units)
        return [(group, unit) for group, units in pairs for unit in units]

    def _cut_where_differs(self, used: set[nn.Parameter]) -> None:
        """See [Note: units and unused parameters]."""
        mixed = {unit for unit in self._all_units() if not (unit.params <= used or used.isdisjoint(unit.params))}
        if mixed:
            self._cut(lambda unit, piece: unit in mixed and piece.param in used)

    def _cut(self, part: Callable[[Unit, Piece], object]) -> None:
        """Cut units, their states with them, between neighbours for which `part` is not the same."""
        for number, units in enumerate(self.units):
            found: list[Unit] = []
            for unit in units:
                runs = [list(run) for _, run in groupby(unit.pieces, partial(part, unit))]
                if len(runs) == 1:
                    found.append(unit)
                    continue
                for cut, state in unit.cut(runs, self.optimizer.state.pop(unit.tensor, {})):
                    found.append(cut)
                    if state:
                        self.optimizer.state[cut.tensor] = state
            self.units[number] = found

    def cuts(self) -> list[tuple[int, int]]:
        """Where units begin: numbers of storages, and offsets in them."""
        return [self._beginning(unit, unit.start) for unit in self._all_units()]

    def _beginning(self, unit: Unit, offset: int) -> tuple[int, int]:
        return next(i for i, storage in enumerate(self.storages) if storage is unit.bucket.storage), offset

    def cut_as(self, cuts: list[tuple[int, int]]) -> None:
        for begin in set(cuts) - set(self.cuts()):
            self._cut(partial(self._is_behind, begin))

    def _is_behind(self, begin: tuple[int, int], unit: Unit, piece: Piece) -> bool:
        return begin <= self._beginning(unit, piece.offset)

    def _follow(self, unit: Unit) -> None:
        """Take over entries that something else has written into the model since the last step."""
        model, master = unit.model_part(), unit.tensor.data.view(-1)
        written = model != master.to(model.device, model.dtype)
        if written.any():
            where = written.to(master.device)
            master[where] = model[written].to(master.device, master.dtype)

    def commit(self) -> None:
        if self.copies:
            for unit in self._all_units():
                if unit.tensor.grad is not None:
                    unit.model_part().copy_(unit.tensor.data.view(-1))
        self._gather()

    def _gather(self) -> None:
        """Give every rank the parts of all."""
        works, used = [], self.reducer.to_step
        for bucket in self.reducer.buckets:
            if used.isdisjoint(bucket.params):
                continue
            whole = bucket.storage.flat[bucket.plan.start : bucket.plan.start + bucket.plan.numel]
            works += gather_in_place_start(whole, bucket.plan.sizes, self.axis)
        for work in works:
            wait(work, self.axis, "all_gather")

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.reducer.forget()
        if set_to_none:
            self.reducer.zeroed.clear()

    def refresh(self) -> None:
        for storage in self.storages:
            storage.attach()
        if self.copies:
            for unit in self._all_units():
                unit.tensor.data.view(-1).copy_(unit.model_part())
