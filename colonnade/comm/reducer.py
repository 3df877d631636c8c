"""GradientReducer: averages gradients over an axis while the backward pass is still running.

[Note: buckets in order]
Gradients become ready from the last layer to the first. They are collected in flat buckets in that order; a bucket whose
gradients are all ready is reduced while backward goes on. Every rank launches the buckets in the same order, whatever
the order in which they fill, so that collectives always meet their counterparts.

[Note: parameters without a gradient]
A parameter may have got a gradient on one rank and none on another. After the backward the ranks tell each other in one
small exchange whether anything was missing; only then do they compare parameter by parameter. A parameter that no rank
used keeps no gradient at all, so that the optimizer passes over it, as in one process.

[Note: when a backward ends]
`booster.backward` calls `backward` here, which knows. A plain `loss.backward()` is reduced as well: the first gradient that
becomes ready asks the engine to call `finish` when it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from colonnade.cluster.mesh import Axis
from colonnade.comm.collectives import all_gather, all_reduce_async, wait


class _Bucket:
    """Parameters whose gradients travel in one flat buffer. Gradients are views of it after the first reduction."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.waiting = set(params)
        self.held: set[nn.Parameter] = set()
        self.work: dist.Work | None = None
        self._flat: torch.Tensor | None = None
        self._views: dict[nn.Parameter, torch.Tensor] = {}

    def reset(self) -> None:
        self.waiting, self.work = set(self.params), None

    def flat(self) -> torch.Tensor:
        """The buffer, filled with the present gradients, zero where there is none."""
        if self._flat is None or self._flat.dtype != self.params[0].dtype:
            self._flat = self.params[0].new_empty(sum(p.numel() for p in self.params))
            pieces = self._flat.split([p.numel() for p in self.params])
            self._views = {p: piece.view(p.shape) for p, piece in zip(self.params, pieces)}
        for param, view in self._views.items():
            if param.grad is None:
                view.zero_()
            elif param.grad.data_ptr() != view.data_ptr():
                view.copy_(param.grad)
                param.grad = view
        return self._flat

    def detach(self) -> None:
        """Take the gradients off the parameters while they travel: what a backward still adds is collected apart."""
        self.held = {p for p in self.params if p.grad is not None}
        for param in self.params:
            param.grad = None

    def attach(self) -> dict[nn.Parameter, torch.Tensor]:
        """Put the reduced gradients back; returns what was added meanwhile."""
        late = {p: p.grad for p in self.params if p.grad is not None}
        for param in self.params:
            param.grad = self._views[param] if param in self.held or param in late else None
        return late

    def adopt(self, param: nn.Parameter) -> None:
        """Give a parameter that had no gradient on this rank the one that others found."""
        param.grad = self._views[param]


class GradientReducer:
    """Averages the gradients of parameters over an axis.

    Args:
        parameters: those that train, in the order of the model.
        axis: the ranks to average over (data parallel).
        bucket_bytes: size at which a bucket is closed.

    Traffic: one all-reduce of every gradient element a step, and one all-gather of two numbers.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], axis: Axis, bucket_bytes: int = 8 << 20) -> None:
        self.axis, self.bucket_bytes = axis, bucket_bytes
        self.buckets: list[_Bucket] = []
        self._parameters = list(parameters) if axis.size > 1 else []
        self._home: dict[nn.Parameter, _Bucket] = {}
        self._next = 0
        self._paused = False
        self._will_finish = False
        self._handles: list[Any] = []
        self.unreduced = False  # gradients have been accumulated and not averaged
        self._take_in()

    def _take_in(self) -> None:
        """Make buckets for parameters that train and have none: all at first, later those that have been thawed."""
        for group in _group([p for p in self._parameters if p not in self._home], self.bucket_bytes):
            bucket = _Bucket(group)
            self.buckets.append(bucket)
            for param in group:
                self._home[param] = bucket
                self._handles.append(param.register_post_accumulate_grad_hook(self._ready))
                earlier = getattr(param, "_gradient_reducer", None)
                if earlier is not None and earlier is not self:
                    earlier.close()
                param._gradient_reducer = self  # type: ignore[attr-defined]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Only accumulate inside the block; the next backward outside it reduces everything accumulated."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

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
        if self._paused:
            self.unreduced = True
            return
        if not self._will_finish:
            self._will_finish = True
            # no public name for it; what DistributedDataParallel uses for the same purpose
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # type: ignore[attr-defined]
        self._home[param].waiting.discard(param)
        while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
            self._launch(self.buckets[self._next])

    def _launch(self, bucket: _Bucket) -> None:
        flat = bucket.flat().mul_(1.0 / self.axis.size)
        bucket.detach()
        bucket.work = all_reduce_async(flat, self.axis)
        self._next += 1

    def finish(self) -> None:
        """Reduce what has not been, and wait for all of it: the end of each backward that is not paused."""
        self._will_finish = False
        if self._paused or not self._parameters:
            return
        self._take_in()
        if not self.buckets:
            return
        self.unreduced = False
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)
        late: dict[nn.Parameter, torch.Tensor] = {}
        for bucket in self.buckets:
            wait(bucket.work, self.axis)
            late |= bucket.attach()
            bucket.reset()
        self._next = 0
        unused = {p for p in self._home if p.grad is None}
        mine = next(iter(self._home)).new_tensor([float(bool(unused)), float(bool(late))])
        missing, added = torch.stack(all_gather(mine, self.axis)).amax(0).tolist()
        if missing:
            self._complete(unused)
        if added:
            self._add_late(late)

    def _add_late(self, late: dict[nn.Parameter, torch.Tensor]) -> None:
        """Reduce what came after its bucket had left: a parameter that one backward visits more than once."""
        for bucket in self.buckets:
            parts = [late.get(p, torch.zeros_like(p)).reshape(-1) for p in bucket.params]
            flat = torch.cat(parts).mul_(1.0 / self.axis.size)
            wait(all_reduce_async(flat, self.axis), self.axis)
            for param, part in zip(bucket.params, flat.split([p.numel() for p in bucket.params])):
                if param.grad is not None:
                    param.grad += part.view_as(param)

    def _abort(self) -> None:
        """After a backward that raised: wait for what is under way, and begin anew with the next one."""
        for bucket in self.buckets[: self._next]:
            wait(bucket.work, self.axis)
            bucket.attach()
        for bucket in self.buckets:
            bucket.reset()
        self._next = 0

    def covers(self, param: nn.Parameter) -> bool:
        """Whether a parameter's gradient is averaged here."""
        return self.axis.size == 1 or param in self._home

    def close(self) -> None:
        """Take no further part: another reducer takes over the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _complete(self, unused: set[nn.Parameter]) -> None:
        params = list(self._home)
        mine = torch.tensor([float(p not in unused) for p in params], device=params[0].device)
        used = torch.stack(all_gather(mine, self.axis)).amax(0).tolist()
        for param, by_any in zip(params, used):
            if by_any and param in unused:
                self._home[param].adopt(param)


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
