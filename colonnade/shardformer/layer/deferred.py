"""The backward pass of linear layers in two parts: gradients of inputs first, gradients of weights when somebody says so.

[Note: a backward pass in two parts]
Of a linear layer's backward only the gradient of its input is waited for, by the layer before it, which in a pipeline may
be on another rank. So schedules without a bubble (Zero Bubble Pipeline Parallelism, Qi et al. 2023) run it as B, which
makes the gradients of inputs, and W, which makes those of weights and fills the gaps that are left:

    weights = WeightGradients()
    with weights.deferring():            # F: the products are made such that they can be split
        loss = model(**batch).loss
    with weights.deferring():            # B: each leaves here what its weight's gradient is made of
        loss.backward()
    weights.run()                        # W

A product made while a store is active has its weight beside the graph, not in it: a weight in the graph would get its turn
in B, and hooks of the user's would be called without a gradient. W is a backward pass of its own, over a graph of one node
for each weight, whose backward computes the gradient. So tensor hooks, accumulation, hooks after it and callbacks of the
engine work there as in any backward pass, and no more than one of the gradients exists that has not been accumulated.
Where no store is active in F everything is as ever.

What cannot be split is ordinary under a store too, its weight's gradient made in B: an input that needs no gradient, a
weight that is frozen or computed from others, autocast (which casts inside torch's own operators only).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from colonnade.shardformer.layer.own_forward import has_own_forward

# of the process, not of a thread: on accelerators autograd has threads of its own
_active: WeightGradients | None = None


class Factors(NamedTuple):
    """What a weight gradient is the product of: left.T @ right, each [tokens, features]."""

    left: torch.Tensor
    right: torch.Tensor


class WeightGradients:
    """Weight gradients that a backward pass has left to be made; see [Note: a backward pass in two parts].

    A store is for one backward pass, that of a micro-batch for instance; afterwards it can be used for another.
    """

    def __init__(self) -> None:
        self._waiting: dict[nn.Parameter, list[Factors]] = {}

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Within, linear layers are made such that they can be split, and backward passes leave weight gradients here.

        Around a forward pass and around its backward pass. If the block raises, what has been left is dropped.
        """
        global _active
        before, _active = _active, self
        try:
            yield
        except BaseException:
            self._waiting.clear()
            raise
        finally:
            _active = before

    def add(self, weight: nn.Parameter, factors: Factors) -> None:
        """Leave a weight's gradient, or a part of it, to be made."""
        self._waiting.setdefault(weight, []).append(factors)

    def run(self) -> None:
        """Make the gradients, those first that were left first, and accumulate them as a backward pass does."""
        waiting, self._waiting = self._waiting, {}
        with torch.enable_grad():  # autograd begins with the node that was made last
            ends = [_Late.apply(weight, waiting.pop(weight)) for weight in reversed(list(waiting))]
        if ends:
            torch.autograd.backward(ends)

    @property
    def held_bytes(self) -> int:
        """Memory that is kept for the gradients to be made: inputs and output gradients, each storage once."""
        kept = (t.untyped_storage() for of_weight in self._waiting.values() for factors in of_weight for t in factors)
        return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())


class _Late(Function):
    """A number that nobody reads, whose backward pass makes the gradient of a weight."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, factors: list[Factors]) -> torch.Tensor:
        ctx.factors = factors
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient: Any = None
        while ctx.factors:  # let go of one by one
            left, right = ctx.factors.pop(0)
            part = left.t() @ right
            gradient = part if gradient is None else gradient.add_(part)
        return gradient, None


def is_deferring() -> bool:
    """Whether a store is active: whether products are to be made such that they can be split."""
    return _active is not None


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> torch.Tensor:
    """x @ w.T + b, or x @ w + b for a weight that is kept transposed."""
    if not transposed:
        return F.linear(x, weight, bias)
    if bias is None:
        return x @ weight
    y = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
    return y.view(*x.shape[:-1], y.shape[-1])


class _Keep(Function):
    """Hands the input of a product on, and keeps it for the gradient of the weight.

    Saved before the product is made: a recomputation that needs no more than what is saved need not make it.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pending: _Pending) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.pending = pending
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        (x,) = ctx.saved_tensors
        if dx is not None:
            ctx.pending.leave(x)
        return dx, None


class _Pending:
    """A product, from the moment its backward begins until the gradient of its input has been made.

    Args:
        weight: the parameter.
        transposed: it is [in, out].
    """

    def __init__(self, weight: nn.Parameter, transposed: bool) -> None:
        self.weight, self.transposed = weight, transposed
        self.dy: torch.Tensor | None = None

    def begin(self, dy: torch.Tensor) -> None:
        """Hook of the product's output."""
        self.dy = dy

    def leave(self, x: torch.Tensor) -> None:
        """Leave the making of the weight's gradient to the store."""
        dy, self.dy = self.dy, None
        assert dy is not None, "the gradient of a product's input was made without that of its output"
        rows_x, rows_dy = (t.detach().reshape(-1, t.shape[-1]) for t in (x, dy))  # detached: they hold on to no graph
        store = _active or WeightGradients()
        store.add(self.weight, Factors(rows_x, rows_dy) if self.transposed else Factors(rows_dy, rows_x))
        if store is not _active:  # the forward pass was made under a store, this backward pass was not
            store.run()


def linear_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, transposed: bool = False
) -> torch.Tensor:
    """What a linear layer computes: x @ w.T + b; made such that its backward can be split if a store is active.

    Args:
        x: [..., in].
        weight: [out, in], or [in, out] if transposed.

    Returns:
        [..., out].
    """
    if not (is_deferring() and isinstance(weight, nn.Parameter) and _can_wait(x, weight)):
        return product(x, weight, bias, transposed)
    pending = _Pending(weight, transposed)
    y = product(_Keep.apply(x.contiguous(), pending), weight.detach(), bias, transposed)
    made = y if y._base is None else y._base  # a view that is changed in place forgets its hooks
    made.register_hook(pending.begin)
    return y


def _can_wait(x: torch.Tensor, weight: nn.Parameter) -> bool:
    trains = x.requires_grad and weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()
    return trains and not torch.is_autocast_enabled(x.device.type)


def split_backward(module: nn.Module) -> None:
    """Let the native linear layers inside a module have their backward pass split; our parallel ones do anyway.

    These are `nn.Linear`, transformers' Conv1D, and subclasses of them as far as their forward calls the parent's. They
    change their class in place, for a subclass of the same name; objects, parameters, hooks and the names in a state dict
    stay. Layers that are to be split over ranks must have been already. A second call changes nothing.
    """
    for part in module.modules():
        found = _native(part)
        if found is not None and not isinstance(part, _Splits):
            part.__class__ = _prepared(type(part), *found)  # type: ignore[assignment, arg-type]  # classes are hashable


class _Splits:
    """In the class of every layer that `split_backward` has prepared."""


class _LinearForward(_Splits):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # torch's own name for it
        if not is_deferring():
            return super().forward(input)  # type: ignore[misc]
        return linear_product(input, self.weight, self.bias)  # type: ignore[attr-defined]


class _Conv1DForward(_Splits):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_deferring():
            return super().forward(x)  # type: ignore[misc]
        return linear_product(x, self.weight, self.bias, transposed=True)  # type: ignore[attr-defined]


def _native(module: nn.Module) -> tuple[type[nn.Module], type] | None:
    """The native class whose forward a module reaches, and the forward to put before it."""
    conv1d = next((c for c in type(module).__mro__ if _is_conv1d(c)), None)
    base: type[nn.Module] | None = nn.Linear if isinstance(module, nn.Linear) else conv1d
    if base is None or has_own_forward(module, base):
        return None
    return base, _LinearForward if base is nn.Linear else _Conv1DForward


def _is_conv1d(cls: type) -> bool:
    return cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.")


@cache
def _prepared(kind: type, base: type, forward: type) -> type:
    """A class like `kind` in which `forward` comes just before that of `base`."""
    if kind is base:
        return type(kind.__name__, (forward, base), _described(kind))
    return type(kind.__name__, (kind, _prepared(base, base, forward)), _described(kind))


def _described(kind: type) -> dict[str, Any]:
    return {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
