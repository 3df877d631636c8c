"""Averaging gradients over an axis while the backward pass is still running.

[Note: buckets in order]
Gradients become ready from the last layer to the first. They are collected in flat buckets in that order; a bucket whose
gradients are all ready is reduced while backward goes on. Every rank launches the buckets in the same order, whatever
the order in which they fill, so that collectives always meet their counterparts.

[Note: parameters without a gradient]
A parameter may have got a gradient on one rank and none on another. After the backward the ranks tell each other in one
small exchange whether anything was missing; only then do they compare parameter by parameter. A parameter that no rank
used keeps no gradient at all, so that the optimizer passes over it, as in one process.

[Note: when a backward ends]
`booster.backward` calls `backward` of the reducer, which knows. A plain `loss.backward()` is reduced as well: the first gradient that
becomes ready asks the engine to call `finish` when it is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather, all_reduce_async, wait


class Bucket(ABC):
    """Parameters whose gradients travel together."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.waiting = set(params)

    def reset(self) -> None:
        """Begin anew with the next backward."""
        self.waiting = set(self.params)

    @abstractmethod
    def launch(self, axis: Axis) -> None:
        """Start to average the gradients that are there, as zero where there is none."""

    @abstractmethod
    def complete(self, axis: Axis) -> None:
        """Wait for what `launch` has started; a second call does nothing."""


B = TypeVar("B", bound=Bucket)


class BucketReducer(ABC, Generic[B]):
    """Averages the gradients of parameters over an axis, bucket by bucket.

    Args:
        axis: the ranks to average over (data parallel).
        overlap: start a bucket as soon as its gradients are ready; else all of them after the backward pass.
        in_flight: how many buckets may be under way at a time; None for any number.

    Attributes:
        unreduced: gradients have been accumulated and not averaged.
    """

    def __init__(self, axis: Axis, overlap: bool = True, in_flight: int | None = None) -> None:
        self.axis, self.overlap, self.in_flight = axis, overlap, in_flight
        self.buckets: list[B] = []
        self.unreduced = False
        self._home: dict[nn.Parameter, list[B]] = {}
        self._next, self._oldest = 0, 0
        self._paused = False
        self._will_finish = False
        self._handles: list[Any] = []

    def _watch(self, buckets: Iterable[B]) -> None:
        """Take part in every backward pass that reaches the parameters of these buckets."""
        for bucket in buckets:
            self.buckets.append(bucket)
            for param in bucket.params:
                if param not in self._home:
                    self._handles.append(param.register_post_accumulate_grad_hook(self._ready))
                    earlier = getattr(param, "_gradient_reducer", None)
                    if earlier is not None and earlier is not self:
                        earlier.close()
                    param._gradient_reducer = self  # type: ignore[attr-defined]
                self._home.setdefault(param, []).append(bucket)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Only accumulate inside the block; the next backward outside it reduces everything accumulated."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def is_paused(self) -> bool:
        """Whether gradients are only accumulated at present."""
        return self._paused

    def contribute(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        """Add a gradient that comes from elsewhere to what has been accumulated."""
        param.grad = grad if param.grad is None else param.grad + grad
        if param in self._home:
            self._ready(param)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward pass of a loss, and the reduction of its gradients unless paused."""
        self._will_finish = True
        try:
            loss.backward(**kwargs)
        except BaseException:
            self._abort()
            raise
        finally:
            self._will_finish = False
        self.finish()

    def _ready(self, param: nn.Parameter) -> None:
        self._collect(param)
        if self._paused:
            self.unreduced = True
            return
        if not self._will_finish:
            self._will_finish = True
            # no public name for it; what DistributedDataParallel uses for the same purpose
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # type: ignore[attr-defined]
        for bucket in self._home[param]:
            bucket.waiting.discard(param)
        while self.overlap and self._next < len(self.buckets) and not self.buckets[self._next].waiting:
            self._launch()

    def _collect(self, param: nn.Parameter) -> None:
        """A gradient has become ready. By default it stays on the parameter until its bucket is launched."""

    def _launch(self) -> None:
        if self.in_flight is not None and self._next - self._oldest >= self.in_flight:
            self.buckets[self._oldest].complete(self.axis)
            self._oldest += 1
        self.buckets[self._next].launch(self.axis)
        self._next += 1

    def finish(self) -> None:
        """Reduce what has not been, and wait for all of it: the end of each backward that is not paused."""
        self._will_finish = False
        if self._paused or not self.buckets:
            return
        self.unreduced = False
        while self._next < len(self.buckets):
            self._launch()
        for bucket in self.buckets[self._oldest :]:
            bucket.complete(self.axis)
        late, unused = self._late(), self._unused()
        self._restart()
        mine = torch.tensor([float(bool(unused)), float(bool(late))], device=self.buckets[0].params[0].device)
        missing, added = torch.stack(all_gather(mine, self.axis)).amax(0).tolist()
        if missing:
            self._complete(unused)
        if added:
            self._add_late(late)

    def _restart(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self._next = self._oldest = 0

    @abstractmethod
    def _late(self) -> dict[nn.Parameter, torch.Tensor]:
        """Gradients that came after their bucket had left: of parameters that one backward visits more than once."""

    @abstractmethod
    def _unused(self) -> set[nn.Parameter]:
        """Parameters that got no gradient on this rank."""

    @abstractmethod
    def _add_late(self, late: dict[nn.Parameter, torch.Tensor]) -> None:
        """Reduce what came too late on any rank."""

    @abstractmethod
    def _settle(self, unused: dict[nn.Parameter, bool]) -> None:
        """For each parameter without a gradient on this rank: whether any other rank has one."""

    def _complete(self, unused: set[nn.Parameter]) -> None:
        params = list(self._home)
        mine = torch.tensor([float(p not in unused) for p in params], device=params[0].device)
        used = torch.stack(all_gather(mine, self.axis)).amax(0).tolist()
        self._settle({param: bool(by_any) for param, by_any in zip(params, used) if param in unused})

    def _abort(self) -> None:
        """After a backward that raised: wait for what is under way, and begin anew with the next one."""
        for bucket in self.buckets[self._oldest : self._next]:
            bucket.complete(self.axis)
        self._restart()

    def forget(self) -> None:
        """Begin anew, whatever a backward pass that has not come to its end has left."""
        self._abort()
        self._will_finish = self.unreduced = False

    def covers(self, param: nn.Parameter) -> bool:
        """Whether a parameter's gradient is averaged here."""
        return self.axis.size == 1 or param in self._home

    def close(self) -> None:
        """Take no further part: another reducer takes over the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class AllReduceBucket(Bucket):
    """Parameters whose gradients are averaged in one flat buffer. They are views of it after the first reduction."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params)
        self.held: set[nn.Parameter] = set()
        self.late: dict[nn.Parameter, torch.Tensor] = {}
        self._launched = False
        self._work: dist.Work | None = None
        self._flat: torch.Tensor | None = None
        self._views: dict[nn.Parameter, torch.Tensor] = {}

    def launch(self, axis: Axis) -> None:
        flat = self._filled().mul_(1.0 / axis.size)
        # while they travel, gradients are off the parameters: what a backward still adds is collected apart
        self.held = {p for p in self.params if p.grad is not None}
        for param in self.params:
            param.grad = None
        self._work, self._launched = all_reduce_async(flat, axis), True

    def _filled(self) -> torch.Tensor:
        """The buffer with the present gradients, zero where there is none."""
        if self._flat is None or self._flat.dtype != self.params[0].dtype:
            self._flat = self.params[0].new_empty(sum(p.numel() for p in self.params))
            pieces = self._flat.split([p.numel() for p in self.params])
            self._views = {p: piece.view(p.shape) for p, piece in zip(self.params, pieces)}
        for param, view in self._views.items():
            if param.grad is None:
                view.zero_()
            elif param.grad.is_sparse or param.grad.data_ptr() != view.data_ptr():
                view.copy_(param.grad.to_dense() if param.grad.is_sparse else param.grad)
                param.grad = view
        return self._flat

    def complete(self, axis: Axis) -> None:
        if not self._launched:
            return
        wait(self._work, axis)
        self._work, self._launched = None, False
        self.late = {p: p.grad for p in self.params if p.grad is not None}
        for param in self.params:
            param.grad = self._views[param] if param in self.held or param in self.late else None

    def adopt(self, param: nn.Parameter) -> None:
        """Give a parameter that had no gradient on this rank the one that others found."""
        param.grad = self._views[param]


class GradientReducer(BucketReducer[AllReduceBucket]):
    """Averages the gradients of parameters over an axis and leaves them on the parameters.

    Args:
        parameters: those that train, in the order of the model.
        axis: the ranks to average over (data parallel).
        bucket_bytes: size at which a bucket is closed.

    Traffic: one all-reduce of every gradient element a step, and one all-gather of two numbers.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], axis: Axis, bucket_bytes: int = 8 << 20) -> None:
        super().__init__(axis)
        self.bucket_bytes = bucket_bytes
        self._parameters = list(parameters) if axis.size > 1 else []
        self._take_in()

    def _take_in(self) -> None:
        """Make buckets for parameters that train and have none: all at first, later those that have been thawed."""
        new = [p for p in self._parameters if p not in self._home]
        self._watch(AllReduceBucket(group) for group in _group(new, self.bucket_bytes))

    def finish(self) -> None:
        if not self._paused:
            self._take_in()
        super().finish()

    def _late(self) -> dict[nn.Parameter, torch.Tensor]:
        return {param: grad for bucket in self.buckets for param, grad in bucket.late.items()}

    def _unused(self) -> set[nn.Parameter]:
        return {p for p in self._home if p.grad is None}

    def _settle(self, unused: dict[nn.Parameter, bool]) -> None:
        for param, by_any in unused.items():
            if by_any:
                self._home[param][0].adopt(param)

    def _add_late(self, late: dict[nn.Parameter, torch.Tensor]) -> None:
        for bucket in self.buckets:
            parts = [late.get(p, torch.zeros_like(p)).reshape(-1) for p in bucket.params]
            flat = torch.cat(parts).mul_(1.0 / self.axis.size)
            wait(all_reduce_async(flat, self.axis), self.axis)
            for param, part in zip(bucket.params, flat.split([p.numel() for p in bucket.params])):
                if param.grad is not None:
                    param.grad += part.view_as(param)


def _group(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Buckets in the order in which gradients become ready, of one dtype and device each."""
    groups: list[list[nn.Parameter]] = []
    size, kind = 0, None
    for param in reversed([p for p in parameters if p.requires_grad]):
        nbytes = param.numel() * param.element_size()
        if not groups or kind != (param.dtype, param.device) or size + nbytes > bucket_bytes:
            groups.append([])
            size, kind = 0, (param.dtype, param.device)
        groups[-1].append(param)
        size += nbytes
    return groups
