"""ParallelOptimizer: any torch optimizer, with gradients reduced, measured and clipped over the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from colonnade.cluster.device import current_device
from colonnade.cluster.mesh import ParallelMesh
from colonnade.comm.reducer import BucketReducer
from colonnade.errors import ConfigError, UsageError, explain
from colonnade.model.layout import has_layout, layout_of, local_of
from colonnade.precision.clipping import Clipping
from colonnade.precision.grad_norm import gradient_norm
from colonnade.precision.loss_scale import DynamicLossScale
from colonnade.precision.state import ParameterState, SavedState
from colonnade.precision.stepped import OwnParameters, Stepped


class Reducer(Protocol):
    """What averages gradients over data-parallel ranks."""

    @property
    def unreduced(self) -> bool:
        """Whether gradients have been accumulated and not averaged."""

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward pass of a loss, and the reduction of its gradients unless paused."""

    def paused(self) -> AbstractContextManager[None]:
        """Only accumulate inside the block."""

    def finish(self) -> None:
        """Reduce what has only been accumulated."""

    def covers(self, param: nn.Parameter) -> bool:
        """Whether a parameter's gradient is averaged here."""

    def forget(self) -> None:
        """Begin anew, whatever a backward pass that has not come to its end has left."""


class Copies(Protocol):
    """Parameters of this rank's model that the optimizer of another pipeline stage steps on, and the other way round."""

    def add_gradients(self, contribute: Callable[[nn.Parameter, torch.Tensor], None]) -> None:
        """Hand the gradients of copies to those that step on them."""

    def copy_weights(self) -> None:
        """Give copies the new weights."""

    def forget(self) -> None:
        """Drop the gradients of copies."""

    @property
    def copies(self) -> set[nn.Parameter]:
        """Parameters that another stage steps on."""


class ParallelOptimizer(Optimizer):
    """Wraps the user's optimizer; parameters and groups stay the user's own objects.

    Args:
        inner: the optimizer to step.
        mesh: where parameters are split.
        stepped: what it steps on; by default the parameters themselves.
        clipping: how gradients are clipped.
        loss_scale: what losses are multiplied by, for fp16; None for no scale.

    Attributes:
        reducer: averages gradients over data-parallel ranks; None where something else does.
        covered: says which parameters that something else averages.
        copies: parameters that several pipeline stages hold; None where there are none.
        names: of each parameter of the model, the keys of its state dict.
        check_replicas: `step` raises where ranks hold different gradients for what they all hold.
    """

    def __init__(
        self,
        inner: Optimizer,
        mesh: ParallelMesh,
        stepped: Stepped | None = None,
        clipping: Clipping | None = None,
        loss_scale: DynamicLossScale | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: groups, state and hooks are those of the wrapped optimizer
        self.inner, self.mesh, self.clipping = inner, mesh, clipping or Clipping()
        self.reducer: Reducer | None = None
        self.covered: Callable[[nn.Parameter], bool] | None = None
        self.copies: Copies | None = None
        self.names: dict[nn.Parameter, tuple[str, ...]] = {}
        self.check_replicas = True
        self.stepped = stepped or OwnParameters(inner, mesh)
        self.loss_scaler = loss_scale
        self._scaled = False  # a scaled loss has been backwarded since the gradients were last dropped
        self._apart = False  # pipeline stages have accumulated what `reduce` has not brought together yet
        self._norm: torch.Tensor | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's own groups."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's own state."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.inner.defaults

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last step's gradient before clipping, the same on every rank; None before the first step."""
        return None if self._norm is None else float(self._norm)

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by; 1 without a loss scale."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward pass, and the reduction of its gradients unless inside `no_sync`."""
        loss = self.scaled(loss)
        if self.reducer is None:
            loss.backward(**kwargs)
        else:
            self.reducer.backward(loss, **kwargs)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What the backward pass of a loss starts from: the loss, times the loss scale where there is one."""
        self._scaled = True
        return loss if self.loss_scaler is None else loss.float() * self.loss_scaler.scale

    def backward_from(self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Backward pass from inside a graph, as a pipeline stage does it. Inside `no_sync`; `reduce` follows the last one."""
        self._scaled = self._apart = True
        if tensors:
            torch.autograd.backward(list(tensors), list(gradients))

    def reduce(self) -> None:
        """Bring together what pipeline stages and data-parallel ranks have accumulated, unless inside `no_sync`."""
        if not isinstance(self.reducer, BucketReducer) or self.reducer.is_paused:
            return
        self._apart = False
        if self.copies is not None:
            with self.reducer.paused():
                self.copies.add_gradients(self.reducer.contribute)
        self.reducer.finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only; the next backward outside the block reduces them."""
        if self.reducer is None:
            yield
        else:
            with self.reducer.paused():
                yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Measure, clip, and step the wrapped optimizer; with a loss scale, leave the step out where gradients overflowed.

        Raises:
            ConfigError: a closure is given; it would run the model several times a step, outside of the reduction.
            UsageError: there are gradients that nothing averages over ranks, or with a loss scale those of a loss that
                was not scaled.
        """
        if closure is not None:
            raise ConfigError("step(closure) is not possible: call booster.backward(loss, optimizer), then step().")
        self._complete_reduction()
        with self.stepped.stepping():
            parameters = self.stepped.tensors()
            self._unscale(parameters)
            parts = self.stepped.gradient_parts()
            self._norm = gradient_norm(parts, self.mesh, current_device(), self.check_replicas)
            if self.loss_scaler is not None and not self._good_step(self.loss_scaler, float(self._norm)):
                return None
            self.clipping.apply(parameters, self._norm)
            result = self.inner.step()
            self.stepped.commit()
        if self.copies is not None:
            self.copies.copy_weights()
        return result

    def _good_step(self, loss_scaler: DynamicLossScale, norm: float) -> bool:
        """Move the loss scale; whether the step is to be made."""
        if norm and not self._scaled:
            raise UsageError(
                explain(
                    "there are gradients of a loss that was not scaled.",
                    [
                        ("rule", "in fp16 they would be divided by a loss scale that they have not been multiplied by"),
                        ("try", "booster.backward(loss, optimizer) instead of loss.backward()"),
                    ],
                )
            )
        good = loss_scaler.update(norm)
        if not good:
            self.inner._opt_called = True  # type: ignore[attr-defined]  # else torch's schedulers warn of a missing step
        return good

    def _unscale(self, parameters: list[nn.Parameter]) -> None:
        grads = [local_of(param.grad) for param in parameters if param.grad is not None]
        if self.loss_scale != 1 and grads:
            torch._foreach_mul_(grads, 1.0 / self.loss_scale)

    def _complete_reduction(self) -> None:
        """Average what was only accumulated, and refuse gradients that nothing averages."""
        if self._apart:
            self.reduce()
        elif self.reducer is not None and self.reducer.unreduced:
            self.reducer.finish()
        covers = (
            self.covered if self.covered is not None else (self.reducer.covers if self.reducer is not None else None)
        )
        missed = sum(p.grad is not None and not covers(p) for p in self.stepped.tensors()) if covers is not None else 0
        if missed:
            raise UsageError(
                explain(
                    f"{missed} parameter{'s have gradients that are' if missed > 1 else ' has a gradient that is'} not averaged over data-parallel ranks.",
                    [
                        ("reason", "they were added, or thawed, after boost"),
                        ("try", "add modules and parameter groups, and thaw, before boost"),
                    ],
                )
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the accumulated gradients."""
        if self.reducer is not None:
            self.reducer.forget()
        if self.copies is not None:
            self.copies.forget()
        self.stepped.zero_grad(set_to_none)
        self._scaled = self._apart = False

    def states(self) -> list[ParameterState]:
        """What the wrapped optimizer keeps for each parameter, in terms of the logical one; see `Stepped.states`."""
        return self.stepped.states()

    def restore(self, saved: Callable[[nn.Parameter], SavedState | None]) -> list[ParameterState]:
        """Make memory for states that were saved in any layout; see `Stepped.restore`."""
        return self.stepped.restore(saved)

    def kept_elsewhere(self) -> set[nn.Parameter]:
        """The model's parameters of which something knows the value better: a float32 copy, or another stage."""
        return self.stepped.copied() | (set() if self.copies is None else self.copies.copies)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state: this rank's share; with fp16 the loss scale's too."""
        with self.stepped.swapped():
            state = self.inner.state_dict()
        cuts = self.stepped.cuts()
        state = state if cuts is None else state | {"cuts": cuts}
        return state if self.loss_scaler is None else state | {"loss_scale": self.loss_scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on a rank of the same layout."""
        state = dict(state_dict)
        scale, cuts = state.pop("loss_scale", None), state.pop("cuts", None)
        if cuts is not None:
            self.stepped.cut_as([tuple(cut) for cut in cuts])
        with self.stepped.swapped():  # torch casts state to the format of the parameters it finds
            self.inner.load_state_dict(state)
        if self.loss_scaler is not None and scale is not None:
            self.loss_scaler.load_state_dict(scale)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.inner.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not made yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a boosted optimizer cannot be copied or pickled: it belongs to its model and ranks. Keep its state_dict()."
        )

    def __repr__(self) -> str:
        return f"ParallelOptimizer({self.inner!r})"


ELEMENTWISE = (Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD)
OF_ALL_PARAMETERS = ("lbfgs", "prodigy", "dadapt")
NOT_ELEMENTWISE = ("Adafactor", "Muon", "LBFGS", "Lamb", "LARS", "Shampoo", "SOAP", "GaLore", "CAME")


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer treats each entry by itself, so that any part of a parameter can be stepped on alone.

    An optimizer says it by an attribute `elementwise`; of others the well-known names are looked up.
    """
    said = getattr(optimizer, "elementwise", None)
    if said is not None:
        return said
    kinds = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    return not any(name.lower() in kind for name in NOT_ELEMENTWISE for kind in kinds)


def steps_on_any_part(optimizer: Optimizer) -> bool:
    """Whether an optimizer may be given arbitrary pieces of parameters, of which it is certain that it is elementwise.

    Torch's own that are, and those that say so by an attribute `elementwise`. Others get whole parameters, which is right
    for them in any case.

    Raises:
        ConfigError: one that compares all parameters, of which a rank has only some.
    """
    kinds = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    if any(name in kind for name in OF_ALL_PARAMETERS for kind in kinds):
        raise ConfigError(
            explain(
                f"{type(optimizer).__name__} cannot be dealt out over ranks: its step depends on all parameters at once.",
                [("try", "another optimizer, or for Prodigy and D-Adaptation TorchDDPPlugin")],
            )
        )
    return getattr(optimizer, "elementwise", type(optimizer) in ELEMENTWISE)


def bind_to_mesh(optimizer: Optimizer, mesh: ParallelMesh) -> None:
    """Tell an optimizer that looks at whole matrices over which ranks they are split, once they are.

    Raises:
        ConfigError: it has no way to be told (`set_mesh`), and parameters are split.
    """
    if hasattr(optimizer, "set_mesh"):
        optimizer.set_mesh(mesh)
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not is_elementwise(optimizer) and any(layout_of(p).sharded_axes for p in params):
        raise ConfigError(
            explain(
                f"{type(optimizer).__name__} cannot step on split parameters: its update looks at whole matrices.",
                [
                    ("try", "one of colonnade.optim, which can (Lamb, Lars, Adafactor, CAME, GaLoreAdamW, Muon)"),
                    ("or", "AdamW, SGD or another optimizer that treats each entry by itself, or tp_size=1"),
                ],
            )
        )


def shard_optimizer_state(optimizer: Optimizer) -> None:
    """Cut state that belongs to whole parameters to this rank's share, for an optimizer that has stepped before boost."""
    for param, state in optimizer.state.items():
        if isinstance(param, torch.Tensor) and has_layout(param):
            layout = layout_of(param)
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == layout.shape != local_of(param).shape:
                    state[key] = layout.extract(value)
