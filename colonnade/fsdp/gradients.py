"""The gradients of a model cut by FSDP, which reduces them during the backward pass; here is what it leaves open.

[Note: parameters without a gradient]
Ranks may use different parameters of a unit. So that their buffers agree, FSDP reduces zeros for what a rank did not use.
Afterwards the ranks tell each other in one small exchange whether there was any such parameter; only then do they compare
parameter by parameter. A parameter that no rank used keeps no gradient at all, so that the optimizer passes over it, as in
one process: a zero would let momentum and weight decay move it.

[Note: accumulating without communication]
Inside `paused` every rank keeps the gradients of the *whole* parameters, in the format in which they are computed (in
`reduce_dtype` where that is another): as many bytes as the gathered model, until the next backward outside reduces them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from colonnade.cluster.device import current_device
from colonnade.comm.collectives import all_gather
from colonnade.comm.reducer import GradientReducer
from colonnade.errors import UsageError, explain
from colonnade.fsdp.shard import Place, Sharding


class ShardedGradients:
    """Sees to the gradients of a sharded model; a `Reducer` for `ParallelOptimizer`.

    Args:
        sharding: the model.

    Traffic: FSDP's reduce-scatter of every unit; after each backward that is reduced, an all-gather of one number; an
    all-reduce of the parameters that cannot be cut.
    """

    def __init__(self, sharding: Sharding) -> None:
        self.sharding, self.axis = sharding, sharding.axis
        self._params = [p for places in sharding.places.values() for p in places]
        self._whole = GradientReducer(sharding.whole, self.axis) if sharding.whole else None
        self._watched: set[nn.Parameter] = set()
        self._used: set[nn.Parameter] = set()
        self._before: set[nn.Parameter] | None = None  # those that had a gradient before this round of backwards
        self._paused = False
        self._local_only = False  # the last backward was inside `paused`
        for unit, places in sharding.places.items():
            unit.register_forward_pre_hook(partial(self._watch, places))

    @property
    def unreduced(self) -> bool:
        """Whether there are gradients that `finish` has to see to."""
        return self._before is not None or (self._whole is not None and self._whole.unreduced)

    def covers(self, param: nn.Parameter) -> bool:
        """Whether a parameter's gradient is averaged here; one thawed after boost is."""
        return isinstance(param, DTensor) or (self._whole is not None and self._whole.covers(param))

    def _watch(self, places: dict[nn.Parameter, Place], module: nn.Module, inputs: Any) -> None:
        """Note which gathered parameters get a gradient; FSDP keeps the same tensors for them from its first gather on."""
        for param, (owner, name) in places.items():
            gathered = getattr(owner, name)
            if gathered is not param and gathered.requires_grad and gathered not in self._watched:
                self._watched.add(gathered)
                gathered.register_post_accumulate_grad_hook(partial(self._mark, param))
                for hook in getattr(param, "gradient_hooks", ()):
                    gathered.register_hook(hook)

    def _mark(self, param: nn.Parameter, gathered: torch.Tensor) -> None:
        self._begin()
        self._used.add(param)
        self._local_only = self._paused

    def _begin(self) -> None:
        if self._before is None:
            self._before = {p for p in self._params if p.grad is not None}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Only accumulate inside the block; see [Note: accumulating without communication]."""
        root: Any = self.sharding.model
        before, self._paused = self._paused, True
        root.set_requires_gradient_sync(False)
        try:
            with nullcontext() if self._whole is None else self._whole.paused():
                yield
        finally:
            self._paused = before
            root.set_requires_gradient_sync(not before)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward pass of a loss, and the reduction of its gradients unless paused."""
        self._begin()
        try:
            if self._whole is None:
                loss.backward(**kwargs)
            else:
                self._whole.backward(loss, **kwargs)
        except BaseException:
            self.sharding.recover()
            raise
        self._local_only = self._paused
        if not self._paused:
            self._settle()

    def finish(self) -> None:
        """Complete what was left open.

        Raises:
            UsageError: the last backward was not reduced; FSDP can do that only in a backward.
        """
        if self._local_only:
            raise UsageError(
                explain(
                    "the gradients of the last backward have been accumulated on this rank only.",
                    [
                        (
                            "rule",
                            "under FSDP the last backward before a step reduces, those before it may be in no_sync",
                        ),
                        ("try", "the last micro-step outside of booster.no_sync(...)"),
                    ],
                )
            )
        if self._whole is not None and self._whole.unreduced:
            self._whole.finish()
        if self._before is not None:
            self._settle()

    def forget(self) -> None:
        """Drop gradients that have been accumulated and not reduced.

        Raises:
            UsageError: FSDP keeps them where nobody else can reach them.
        """
        if self._local_only:
            if self.sharding.accumulates_apart:
                raise UsageError(
                    explain(
                        "gradients that were accumulated in reduce_dtype and not reduced cannot be dropped.",
                        [("try", "zero_grad only after a backward outside of booster.no_sync(...)")],
                    )
                )
            for gathered in self._watched:
                gathered.grad = None
        self._used.clear()
        self._before, self._local_only = None, False

    def _settle(self) -> None:
        """Take the zeros away that stand for parameters no rank has used; see [Note: parameters without a gradient]."""
        before, used = self._before or set(), set(self._used)
        self._used.clear()
        self._before = None
        unused = [p for p in self._params if p.grad is not None and p not in used and p not in before]
        if not any(self._gather([float(bool(unused))])):
            return
        by_any = self._gather([float(p in used) for p in self._params])
        anyone = dict(zip(self._params, by_any))
        for param in unused:
            if not anyone[param]:
                param.grad = None

    def _gather(self, values: list[float]) -> list[float]:
        """Entry by entry, the largest number that any rank has."""
        mine = torch.tensor(values, device=current_device())
        return torch.stack(all_gather(mine, self.axis)).amax(0).tolist()
